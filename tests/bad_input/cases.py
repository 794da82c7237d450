"""The table: a command a user might type, what is wrong with what it is given, and the one line it must answer."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from typing import NamedTuple

from . import files
from .files import INDEX, NORM, Setup

GENERATE = "generate model --prompt x --max-tokens 1 "
SERVE = "serve model --port 0 "
REPLAY = "serve --port 0 --engine replay:r.jsonl --tokenizer model"
BATCH = "generate model --input in.jsonl --output out.jsonl "
PLAN = GENERATE + "--plan plan.json"
MESSAGES = "generate model --messages m.json --max-tokens 1"
COMPARE = "op compare kda_chunk --grid "
CONFIG = GENERATE + "--config c.yaml"


class Case(NamedTuple):
    """`message` is a regular expression for the line after `k3hal: error: `."""

    args: str
    message: str
    setup: Setup | None = None
    code: int = 4
    env: Mapping[str, str] = {}


CHECKPOINTS = {
    "no config": (r"model holds no config\.json", files.remove("model/config.json")),
    "config not json": (r"config\.json is not valid JSON", files.put("model/config.json", "{")),
    "config a list": (r"config\.json", files.put("model/config.json", "[]")),
    "config not utf-8": (r"config\.json", files.put("model/config.json", b"\xff\xfe\x00")),
    "config nested deep": (r"config\.json", files.put("model/config.json", "[" * 100_000)),
    "other architecture": (
        r"model_type.*'llama'",
        files.edit("model/config.json", lambda c: c.update(model_type="llama")),
    ),
    "negative width": (r"hidden_size is -1", files.config(hidden_size=-1)),
    "width a text": (r"hidden_size is '128'", files.config(hidden_size="128")),
    "layers not a number": (r"num_hidden_layers", files.config(num_hidden_layers=True)),
    "absurd layers": (r"num_hidden_layers", files.config(num_hidden_layers=10**12)),
    "more experts chosen than there are": (r"num_experts_per_token", files.config(num_experts_per_token=99)),
    "epsilon not finite": (r"rms_norm_eps", files.config(rms_norm_eps=float("nan"))),
    "layer lists that overlap": (
        r"(kda_layers|full_attn_layers)",
        files.edit("model/config.json", lambda c: c["text_config"]["linear_attn_config"].update(kda_layers=[1, 1])),
    ),
    "no index": (r"holds neither model\.safetensors\.index\.json nor", files.remove(INDEX)),
    "index not json": (r"index\.json is not valid JSON", files.put(INDEX, "{")),
    "index without map": (r"weight_map is None", files.put(INDEX, {})),
    "index leaves the folder": (
        r"'\.\./x\.safetensors'.*expected a \.safetensors file",
        files.point("../x.safetensors"),
    ),
    "index names a pickle": (r"'pytorch_model\.bin'", files.point("pytorch_model.bin")),
    "missing shard": (r"shard model-0000\d-of-.* is missing", lambda d: files.shard_of(d).unlink()),
    "missing tensor": (NORM, files.edit(INDEX, lambda index: index["weight_map"].pop(NORM))),
    "unknown tensor": (r"extra\.weight", files.header(lambda value: value.update({"extra.weight": value.pop(NORM)}))),
    "truncated shard": (
        r"model-00001-of-00004\.safetensors",
        files.truncate("model/model-00001-of-00004.safetensors", 1),
    ),
    "empty shard": (r"is 0 bytes", files.shard(b"")),
    "absurd header": (r"header", files.shard(struct.pack("<Q", 2**60) + b"{}")),
    "header not json": (r"header", files.shard(struct.pack("<Q", 2) + b"{{")),
    "misshapen tensor": (NORM + r".*\[64, 2\]", files.tensor(shape=[64, 2])),
    "mistyped tensor": (NORM + r".*F16", files.tensor(dtype="F16")),
    "offsets beyond the file": (NORM, files.tensor(data_offsets=[0, 10**12])),
    "no tokenizer": (r"cannot read the tokenizer model/tiktoken\.model", files.remove("model/tiktoken.model")),
    "tokenizer line": (
        r"tiktoken\.model line 3: expected `base64 rank`",
        files.vocabulary(lambda lines: lines.__setitem__(2, b"x")),
    ),
    "tokenizer base64": (
        r"tiktoken\.model line 3: .* is not base64",
        files.vocabulary(lambda lines: lines.__setitem__(2, b"??? 2")),
    ),
    "tokenizer rank twice": (r"rank 1 appears twice", files.vocabulary(lambda lines: lines.__setitem__(2, lines[1]))),
    "tokenizer of another model": (
        r"the tokenizer in model has 626 ids, the model only 625",
        files.vocabulary(lambda lines: lines.append(base64.b64encode(b"quite new") + b" 369")),
    ),
    "generation config not json": (
        r"generation_config\.json is not JSON",
        files.put("model/generation_config.json", "{"),
    ),
    "generation config range": (
        r"generation_config\.json: temperature must be in",
        files.put("model/generation_config.json", {"temperature": -1}),
    ),
    "end id outside": (
        r"generation_config\.json: eos_token_id holds 9999",
        files.put("model/generation_config.json", {"eos_token_id": 9999}),
    ),
}

COMMANDS = {
    "no such verb": Case("genrate", r"No such command 'genrate'.*'generate'"),
    "no such flag": Case(GENERATE + "--temprature 1", r"No such option: --temprature"),
    "extra argument": Case(GENERATE + "more", r"unexpected extra argument.*more"),
    "no such model": Case("generate nowhere --prompt x", r"model 'nowhere' is not a directory"),
    "a preset for a model": Case("generate nano --prompt x", r"model 'nano' is a preset"),
    "no slice": Case("serve k3-slice:0 --port 0", r"model 'k3-slice:0' is no slice"),
    "a slice too large": Case(
        "serve k3-slice:4 --device cpu --memory-budget 1 --port 0", r"does not fit: .* GB are missing", code=2
    ),
    "nothing to do": Case("generate model", r"nothing to generate from"),
    "two sources": Case(GENERATE + "--chat y", r"--prompt and --chat exclude"),
    "half a batch": Case("generate model --input in.jsonl", r"--input needs --output"),
    "number that is none": Case(GENERATE + "--top-k many", r"'--top-k'"),
    "temperature": Case(GENERATE + "--temperature -1", r"temperature must be in \[0, 100\], got -1"),
    "temperature not a number": Case(GENERATE + "--temperature nan", r"temperature must be a finite number, got nan"),
    "top_p": Case(GENERATE + "--top-p 0", r"top_p must be in \(0, 1\], got 0"),
    "stop": Case(GENERATE + "--stop ''", r"stop must not hold an empty text"),
    "stop id": Case(GENERATE + "--stop-token-ids 9999", r"stop_token_ids: token id 9999 is outside"),
    "empty prompt": Case("generate model --prompt ''", r"the prompt is empty"),
    "prompt not utf-8": Case("generate model --prompt 'a\udcff'", r"the text is not UTF-8: .* at byte 1"),
    "long prompt": Case(
        "generate model --max-model-len 8 --prompt 'one two three four five six'", r"the prompt has \d+ tokens"
    ),
    "unknown device": Case(GENERATE + "--device gpu", r"unknown device 'gpu'"),
    "device elsewhere": Case(GENERATE + "--device mi355x", r"mi355x.* is not here"),
    "dtype": Case(GENERATE + "--dtype float16", r"--dtype: .*'float16'"),
    "cache dtype": Case(GENERATE + "--kv-cache-dtype int4", r"--kv-cache-dtype: .*'int4'"),
    "expert activations": Case(GENERATE + "--expert-activations fp8", r"--expert-activations: .*'fp8'"),
    "experts that are not MXFP4": Case(
        "generate random:kl-tiny --prompt x --expert-activations mxfp8", r"mxfp8 needs experts in mxfp4", code=2
    ),
    "dtypes that do not go together": Case(GENERATE + "--dtype float32 --kv-cache-dtype bf16", r"kv_cache_dtype bf16"),
    "budget": Case(GENERATE + "--memory-budget 0", r"--memory-budget: .*0"),
    "endless budget": Case(GENERATE + "--memory-budget inf", r"memory_budget is inf"),
    "small budget": Case(GENERATE + "--memory-budget 0.001", r"does not fit: [\d.]+ GB are missing", code=2),
    "length": Case(GENERATE + "--max-model-len 0", r"--max-model-len: .*0"),
    "length beyond the model": Case(GENERATE + "--max-model-len 999999999", r"999999999 exceeds", code=2),
    "sequences": Case(GENERATE + "--max-num-seqs -3", r"--max-num-seqs: .*-3"),
    "tokens below sequences": Case(
        GENERATE + "--max-num-seqs 8 --max-num-batched-tokens 4", r"max_num_batched_tokens is 4, below max_num_seqs 8"
    ),
    "override": Case(GENERATE + "--ops kda_decode", r"--ops: 'kda_decode' is not GLOB=NAME"),
    "override of nothing": Case(GENERATE + "--ops kda_deocde=cpu", r"--ops: no operator matches.*'kda_decode'"),
    "override by nobody": Case(GENERATE + "--ops kda_decode=nul", r"--ops: no provider is called 'nul'.*'null'"),
    "tokenizer folder": Case(GENERATE + "--tokenizer nowhere", r"nowhere/tiktoken\.model: No such file"),
    "port": Case(SERVE + "--port 70000", r"--port: .*70000"),
    "host": Case(SERVE + "--host nowhere.invalid", r"cannot listen on nowhere\.invalid"),
    "empty key": Case(SERVE + "--api-key ''", r"--api-key: .*empty"),
    "cache policy": Case(SERVE + "--prefix-cache-policy lru", r"unknown prefix cache policy 'lru'"),
    "cache interval": Case(SERVE + "--prefix-cache-retention-interval 512", r"prefix_cache_policy is 'cost'"),
    "draft": Case(SERVE + "--draft eagle:3", r"draft is 'eagle:3' \(it is ngram:N with N from 1 to 32"),
    "match unit": Case(SERVE + "--prefix-match-unit 0", r"--prefix-match-unit: .*0"),
    "unknown engine": Case(SERVE + "--engine magic", r"unknown engine 'magic'"),
    "preset": Case("model init --preset huge new", r"no preset 'huge'"),
    "seed": Case("model init --preset nano --seed -1 new", r"seed -1 is out of range"),
    "folder in use": Case("model init --preset nano .", r"is not empty"),
    "manifest of nothing": Case("model manifest nowhere", r"cannot read nowhere"),
    "operator": Case("op explain kda_deocde", r"unknown operator 'kda_deocde'.*'kda_decode'"),
    "dims": Case("op explain kda_decode --shape heads", r"--shape: 'heads' is not NAME=VALUE"),
    "dim that is none": Case(
        "op explain kda_decode --shape haeds=2", r"--shape: kda_decode has no dim 'haeds'.*'heads'"
    ),
    "dim below zero": Case("op explain rms_norm --shape dim=-5", r"--shape: dim is -5 \(numbers from 0 to"),
    "dim beyond 64 bits": Case("op explain rms_norm --shape dim=9223372036854775808", r"--shape: dim is 9223372036"),
    "dim beyond reading": Case("op explain rms_norm --shape dim=" + "9" * 5000, r"--shape: dim is 9+ \("),
    "dim of no part": Case("op explain latent_moe --shape expert_format=foo", r"--shape: latent_moe .* for 'foo'"),
    "phase": Case("op explain kda_decode --phase later", r"--phase is 'later'"),
    "grid that never ends": Case(COMPARE + "tokens=1..1000000", r"--grid: tokens=.* has 1000000 points.*10000"),
    "grid of many axes": Case(COMPARE + "'tokens=1..200;batch=1..200'", r"--grid: 40000 points.*10000"),
    "grid beyond memory": Case(COMPARE + "tokens=99999999999", r"--grid: tokens='99999999999' is too large"),
    "grid beyond reading": Case(COMPARE + "tokens=1.." + "9" * 5000, r"--grid: tokens=.* is too large"),
    "grid axis twice": Case(COMPARE + "'heads=3;heads=4'", r"--grid: the heads axis is given twice"),
    "no tactics": Case("op tune rms_norm", r"^rms_norm: no provider here has tactics", code=2),
    "tuning another's provider": Case(
        "op tune kda_chunk --provider chunkd", r"called 'chunkd' .*known: .*cpu\.chunked"
    ),
    "compared with nobody": Case(
        "op compare kda_chunk --provider cpu.chunkd", r"did you mean 'cpu\.chunked'\? kda_chunk has .*cpu\.chunked"
    ),
    "cache a file": Case(
        "op tune kda_chunk",
        r"/dev/null/k3hal/tactics/tactics\.json: the tactic cache cannot be .*: Not a directory.*XDG_CACHE_HOME",
        env={"XDG_CACHE_HOME": "/dev/null"},
    ),
    "cache nowhere": Case(
        "op tune kda_chunk", r"/proc/none/.*cannot be written: .*XDG_CACHE_HOME", env={"XDG_CACHE_HOME": "/proc/none"}
    ),
    "ranks": Case("op plan --tp 7", r"--tp is 7"),
    "described device": Case("op plan --device mi999", r"unknown device 'mi999'"),
    "unknown variable": Case(GENERATE, r"variable K3HAL_OPTS.*'K3HAL_OPS'", env={"K3HAL_OPTS": "1"}),
    "variable's value": Case(GENERATE, r"K3HAL_DEBUG is 'yes'.*0 or 1", env={"K3HAL_DEBUG": "yes"}),
    "overrides in a variable": Case(GENERATE, r"K3HAL_OPS: 'x' is not GLOB=NAME", env={"K3HAL_OPS": "x"}),
    "cache folder": Case(
        "generate --prompt x",
        r"default model cannot be generated: .*/proc/none.*XDG_CACHE_HOME",
        env={"XDG_CACHE_HOME": "/proc/none"},
    ),
    "settings not there": Case(CONFIG, r"c\.yaml: cannot read: No such file"),
    "settings not yaml": Case(CONFIG, r"c\.yaml: cannot parse", files.put("c.yaml", "a: [")),
    "settings a list": Case(CONFIG, r"c\.yaml: expected a mapping of settings, found list", files.put("c.yaml", "- a")),
    "settings key": Case(
        CONFIG, r"unknown key 'max-model-length'.*max_model_len", files.put("c.yaml", "max-model-length: 9")
    ),
    "settings value": Case(CONFIG, r"c\.yaml: dtype: .*'half'", files.put("c.yaml", "dtype: half")),
    "settings twice": Case(CONFIG, r"c\.yaml: .*'seed' is given twice", files.put("c.yaml", "seed: 1\nseed: 2")),
    "plan not there": Case(PLAN, r"plan\.json: the plan cannot be read: No such file"),
    "plan not json": Case(PLAN, r"plan\.json: not a JSON file", files.put("plan.json", "{")),
    "plan of another schema": Case(PLAN, r"plan\.json: .*k3hal\.op_plan", files.put("plan.json", {"schema": "x/1"})),
    "plan without entries": Case(
        PLAN,
        r"plan\.json: no entry for \w+",
        files.put(
            "plan.json",
            {
                "schema": "k3hal.op_plan/1",
                "device": "cpu",
                "model": "m",
                "dtype": "float32",
                "policy": "warn",
                "entries": [],
            },
        ),
    ),
    "plan and overrides": Case(
        PLAN + " --ops *=reference", r"ops and plan both say what runs", files.put("plan.json", "{}")
    ),
    "replay not there": Case(REPLAY, r"cannot read the replay file r\.jsonl"),
    "replay empty": Case(REPLAY, r"r\.jsonl is empty", files.put("r.jsonl", "")),
    "replay not json": Case(REPLAY, r"r\.jsonl line 2: not JSON", files.put("r.jsonl", '{"ids": [1]}\n{')),
    "replay without ids": Case(REPLAY, r'r\.jsonl line 1: expected an object with "ids"', files.put("r.jsonl", "{}")),
    "replay field": Case(REPLAY, r"line 1: unknown field 'idz'", files.put("r.jsonl", {"ids": [], "idz": 1})),
    "replay id": Case(REPLAY, r"line 1: token id 625 is outside", files.put("r.jsonl", {"ids": [625]})),
    "replay step": Case(REPLAY, r"line 1: per_step must be", files.put("r.jsonl", {"ids": [1], "per_step": 0})),
    "replay time": Case(REPLAY, r"line 1: step_ms must be", files.put("r.jsonl", {"ids": [1], "step_ms": -1})),
    "batch not there": Case(BATCH, r"cannot read in\.jsonl: No such file"),
    "batch a folder": Case(BATCH.replace("in.jsonl", "model"), r"model is not a regular file"),
    "batch empty": Case(BATCH, r"in\.jsonl has no lines", files.put("in.jsonl", "\n")),
    "batch id twice": Case(
        BATCH,
        r"in\.jsonl line 2: custom_id 'a' is also that of line 1",
        files.put("in.jsonl", '{"custom_id": "a", "prompt": "x"}\n' * 2),
    ),
    "batch onto itself": Case(
        BATCH.replace("out.jsonl", "./in.jsonl"),
        r"--input and --output are both in\.jsonl",
        files.put("in.jsonl", {"prompt": "x"}),
    ),
    "batch onto another file": Case(
        BATCH,
        r"out\.jsonl line 1 is no line of a batch's output",
        files.all_of(files.put("in.jsonl", {"prompt": "x"}), files.put("out.jsonl", "precious\n")),
    ),
    "batch into nowhere": Case(
        BATCH.replace("out.jsonl", "nowhere/out.jsonl"),
        r"cannot write nowhere/out\.jsonl: No such file",
        files.put("in.jsonl", {"prompt": "x"}),
    ),
    "batch of another request": Case(
        BATCH,
        r"out\.jsonl answers another request with custom_id 'line-1'",
        files.all_of(
            files.put("in.jsonl", {"prompt": "x"}),
            files.put("out.jsonl", '{"custom_id": "line-1", "response": {}, "error": null, "request": "0"}\n'),
        ),
    ),
    "chat not there": Case(MESSAGES, r"cannot read m\.json: No such file"),
    "chat not json": Case(MESSAGES, r"m\.json is not JSON", files.put("m.json", "[")),
    "chat without messages": Case(MESSAGES, r"m\.json holds no chat", files.put("m.json", {"prompt": "x"})),
    "chat role": Case(MESSAGES, r"messages\[0\]\.role must be .*'cook'", files.put("m.json", [{"role": "cook"}])),
    "chat image": Case(
        MESSAGES,
        r"messages\[0\]\.content\[0\] is an image",
        files.put("m.json", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ),
    "chat field": Case(
        MESSAGES,
        r"thinking_effort must be one of",
        files.put("m.json", {"messages": [{"role": "user", "content": "x"}], "thinking_effort": "some"}),
    ),
    "chat of half a character": Case(
        MESSAGES, r"no low surrogate", files.put("m.json", '[{"role": "user", "content": "a \\ud83d"}]')
    ),
    "render half a character": Case(
        "render m.json --tokenizer model",
        r"not valid Unicode: half a surrogate pair, U\+D83D, at 2",
        files.put("m.json", '{"messages": [{"role": "user", "content": "a \\ud83d"}]}'),
    ),
    "render nothing": Case("render m.json --tokenizer model", r"messages must be", files.put("m.json", {})),
    "render without vocabulary": Case(
        "render c.json --tokenizer .",
        r"cannot read the tokenizer tiktoken\.model",
        files.put("c.json", {"messages": [{"role": "user", "content": "x"}]}),
    ),
}

CASES = {
    f"checkpoint: {name}": Case(GENERATE, message, setup) for name, (message, setup) in CHECKPOINTS.items()
} | COMMANDS
