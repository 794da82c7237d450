"""The replay engine keeps the engine's contract, and its file's mistakes are named."""

import threading
from dataclasses import replace

import pytest

from k3hal.engine.interface import EngineImage, EngineRequest
from k3hal.engine.replay import ReplayEngine
from k3hal.engine.replay_file import ReplayFile, ReplayLine, read_replay_file
from k3hal.errors import DrainingError, InputError, QueueFullError, RequestError
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.sampling_params import SamplingParams
from k3hal.tokenizer import Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
EOS, END = 370, 371


class Collector:
    """Takes outputs and lets a test wait for a request's last one."""

    def __init__(self):
        self.outputs = {}
        self.changed = threading.Condition()

    def __call__(self, outputs):
        with self.changed:
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self.changed.notify_all()

    def wait(self, name):
        with self.changed:
            assert self.changed.wait_for(lambda: any(o.finish_reason for o in self.outputs.get(name, ())), 10)
            outputs = self.outputs[name]
        assert [o.finish_reason is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
        return [t for o in outputs for t in o.token_ids], outputs[-1]


@pytest.fixture
def start():
    engines = []

    def make(lines, **limits):
        engine, collector = ReplayEngine(lines, TOKENIZER, **limits), Collector()
        engine.start(collector)
        engines.append(engine)
        return engine, collector

    yield make
    for engine in engines:
        engine.close()


def request(name, **params):
    return EngineRequest(name, [1, 2], SamplingParams(**{"max_tokens": None, **params}))


def test_lines_are_taken_in_order_of_arrival_and_wrap(start):
    engine, collector = start([ReplayLine((1, 2)), ReplayLine((3,))])
    for name in "abc":
        engine.submit(request(name))
    assert [collector.wait(name)[0] for name in "abc"] == [[1, 2], [3], [1, 2]]
    assert engine.stats().generation_tokens == 5
    assert engine.stats().prompt_tokens == 6


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "stop_reason"),
    [
        ({}, [1, 2, END], "stop", None),
        ({"ignore_eos": True}, [1, 2, END, 3, EOS, 4], "stop", None),
        ({"max_tokens": 2}, [1, 2], "length", None),
        ({"max_tokens": 3}, [1, 2, END], "stop", None),
        ({"stop_token_ids": (2,)}, [1, 2], "stop", 2),
        ({"stop_token_ids": (3,), "ignore_eos": True}, [1, 2, END, 3], "stop", 3),
        ({"min_tokens": 3}, [1, 2, END, 3, EOS], "stop", None),
        ({"max_tokens": 6, "ignore_eos": True}, [1, 2, END, 3, EOS, 4], "length", None),
    ],
)
@pytest.mark.parametrize("per_step", [1, 2, 100])
def test_stopping(start, params, tokens, finish, stop_reason, per_step):
    engine, collector = start([ReplayLine((1, 2, END, 3, EOS, 4), per_step)])
    engine.submit(request("a", **params))
    got, last = collector.wait("a")
    assert (got, last.finish_reason, last.stop_reason) == (tokens, finish, stop_reason)
    assert last.timing.arrival <= last.timing.scheduled <= last.timing.first_token <= last.timing.finished


def test_an_empty_line_finishes_at_once(start):
    engine, collector = start([ReplayLine(())])
    engine.submit(request("a"))
    assert collector.wait("a")[0] == []


def test_the_context_length_ends_a_sequence(start):
    engine, collector = start([ReplayLine((1,) * 50)], max_model_len=8)
    engine.submit(request("a"))
    tokens, last = collector.wait("a")
    assert len(tokens) == 6
    assert last.finish_reason == "length"


def test_logprobs_have_one_entry_per_token(start):
    engine, collector = start([ReplayLine((1, 2, 3), 2)])
    engine.submit(request("a", logprobs=1))
    collector.wait("a")
    entries = [entry for output in collector.outputs["a"] for entry in output.logprobs]
    assert [(e.token_id, e.logprob, e.top) for e in entries] == [(t, 0.0, ((t, 0.0),)) for t in (1, 2, 3)]


def test_abort_ends_a_running_and_a_waiting_request(start):
    engine, collector = start([ReplayLine((1, 2), step_s=60)], max_num_seqs=1)
    engine.submit(request("running"))
    engine.submit(request("waiting"))
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    engine.abort(["running", "waiting", "unknown"])
    assert [collector.wait(name)[1].finish_reason for name in ("running", "waiting")] == ["abort", "abort"]
    assert engine.stats().num_running == 0


def test_refusals(start):
    engine, _ = start([ReplayLine((1,), step_s=60)], max_num_seqs=1, max_queue=1, max_model_len=4)
    for prompt, message in (([], "empty"), ([1] * 4, "4 tokens.*context is 4"), ([625], "below 625")):
        with pytest.raises(RequestError, match=message):
            engine.submit(EngineRequest("x", prompt, SamplingParams()))
    engine.submit(request("a"))
    engine.submit(request("b"))
    with pytest.raises(QueueFullError):
        engine.submit(request("c"))
    engine.close()
    with pytest.raises(DrainingError):
        engine.submit(request("d"))


def test_close_lets_running_requests_finish_in_time(start):
    engine, collector = start([ReplayLine((1, 2), step_s=0.05), ReplayLine((1,), step_s=60)])
    engine.submit(request("quick"))
    engine.submit(request("slow"))
    engine.close(drain_timeout=0.5)
    assert collector.wait("quick")[1].finish_reason == "stop"
    assert collector.wait("slow")[1].finish_reason == "abort"


def test_a_good_file(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"ids": [1, 2], "per_step": 2, "step_ms": 2.5}\n{"ids": []}\n')
    assert read_replay_file(file, 625) == ReplayFile([ReplayLine((1, 2), 2, 0.0025), ReplayLine(())])


@pytest.mark.parametrize("takes", [True, False])
def test_a_first_line_says_whether_the_engine_takes_images(tmp_path, takes):
    file = tmp_path / "lines.jsonl"
    file.write_text(f'{{"takes_images": {str(takes).lower()}}}\n{{"ids": [3]}}\n')
    assert read_replay_file(file, 625) == ReplayFile([ReplayLine((3,))], takes)
    assert ReplayEngine.from_file(file, TOKENIZER).info.takes_images is takes


def test_an_engine_that_takes_text_refuses_an_image(start):
    image = EngineImage(b"", b"", "image/png", 1, 1, position=1, tokens=1)
    with pytest.raises(RequestError, match="text only"):
        start([ReplayLine((1,))])[0].submit(replace(request("a"), images=(image,)))
    engine, collector = start([ReplayLine((1,))], takes_images=True)
    engine.submit(replace(request("a"), images=(image,)))
    assert collector.wait("a")[0] == [1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n", "line 1: not JSON"),
        ('{"ids": [1]}\n\n{"ids": [1]}', "line 2: not JSON"),
        ('{"ids": [1]}\n{"ids": [1', "line 2: not JSON"),
        ("[1, 2]", 'line 1: expected an object with "ids"'),
        ('{"tokens": [1]}', 'line 1: expected an object with "ids"'),
        ('{"ids": 1}', "line 1: ids must be a list"),
        ('{"ids": [1.5]}', "line 1: ids must be a list"),
        ('{"ids": [true]}', "line 1: ids must be a list"),
        ('{"ids": [1, 625]}', "line 1: token id 625 is outside the vocabulary of 625"),
        ('{"ids": [-1]}', "line 1: token id -1"),
        ('{"ids": [1], "per_step": 0}', "line 1: per_step"),
        ('{"ids": [1], "step_ms": -1}', "line 1: step_ms"),
        ('{"ids": [1], "step_ms": NaN}', "line 1: step_ms"),
        ('{"ids": [1], "step_ms": "1"}', "line 1: step_ms"),
        ('{"ids": [1], "speed": 1}', "line 1: unknown field 'speed'"),
        ('{"takes_images": true}', "has no answer"),
        ('{"takes_images": 1}', "line 1: a line that says takes_images"),
        ('{"takes_images": true, "ids": [1]}', "line 1: a line that says takes_images"),
        ('{"ids": [1]}\n{"takes_images": true}', 'line 2: expected an object with "ids"'),
    ],
)
def test_malformed_files_name_the_line(tmp_path, content, message):
    file = tmp_path / "lines.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        ReplayEngine.from_file(file, TOKENIZER)


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_replay_file(tmp_path / "none", 625)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        read_replay_file(tmp_path / "binary", 625)
