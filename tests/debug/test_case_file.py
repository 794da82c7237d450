"""`.k3case` files: what goes in comes out, and a malformed one is an error of one line."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from k3hal.debug.case import Case, sample_cases
from k3hal.debug.case_file import describe_case, load_case, save_case
from k3hal.debug.memory import byte_span, same_bytes
from k3hal.dispatch.registry import get_operator, operator_names
from k3hal.errors import InputError

MakeCase = Callable[..., Case]


@pytest.mark.parametrize("op", operator_names())
def test_every_operator_survives_the_file(op: str, tmp_path: Path) -> None:
    for case in sample_cases(get_operator(op)):
        if case.nbytes > 1e6:
            continue
        back = load_case(save_case(case, tmp_path / "x.k3case"))
        assert (back.op, back.name, back.dtype, back.phase, back.seed) == (op, case.name, case.dtype, case.phase, 0)
        assert (dict(back.dims), back.tags) == (dict(case.dims), case.tags)
        for name, value in case.args.items():
            if isinstance(value, Tensor):
                assert same_bytes(back.args[name], value), name
                assert back.args[name].stride() == value.stride(), name
            else:
                assert back.args[name] == value, name


def test_shared_memory_offsets_and_recorded_outputs_survive(case_of: MakeCase, tmp_path: Path) -> None:
    case = case_of("kda_recurrent", "one", "float32")
    fused = torch.randn(1, 2, 3 * 32)
    q, k, v = (fused[..., 32 * i : 32 * (i + 1)] for i in range(3))
    out = torch.randn(1, 2, 32)
    case = Case(
        case.op, "mine", "float32", {**case.args, "q": q, "k": k, "v": v, "beta": torch.ones(1, 1).expand(1, 2)},
        "decode", case.dims, origin={"layer": 3}, recorded={"out": out},
    )  # fmt: skip
    back = load_case(save_case(case, tmp_path / "x.k3case"))
    pointers = {back.args[n].untyped_storage().data_ptr() for n in "qkv"}
    assert len(pointers) == 1
    assert byte_span(back.args["v"])[0] - byte_span(back.args["q"])[0] == 64 * 4
    assert back.args["beta"].stride() == (1, 0)
    assert back.origin == {"layer": 3}
    assert torch.equal(back.recorded["out"], out)
    back.args["q"].fill_(2.0)
    assert float(back.args["k"].abs().max()) == float(k.abs().max())


def test_the_zip_is_stored_and_readable_by_others(case_of: MakeCase, tmp_path: Path) -> None:
    path = save_case(case_of("rms_norm", "plain"), tmp_path / "x.k3case")
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == ["case.json", "tensors.safetensors"]
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        tensors = safetensors.torch.load(archive.read("tensors.safetensors"))
        document = json.loads(archive.read("case.json"))
    assert next(iter(document)) == "schema"
    assert document["versions"]["torch"] == torch.__version__
    assert tensors["before/x"].shape == tuple(document["arguments"]["x"]["shape"])


def _rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None], case: Case) -> None:
    document, tensors = describe_case(case)
    change(document, tensors)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("case.json", json.dumps(document))
        archive.writestr("tensors.safetensors", safetensors.torch.save(tensors))


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        at: Any = document
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("schema", to="k3hal.case/2"), "schema is 'k3hal.case/2' (this version reads k3hal.case/1)"),
        (_set("schema", to=3), "'schema' is not a string"),
        (_set("op", to="rms_nrom"), "unknown operator 'rms_nrom' (did you mean 'rms_norm'?"),
        (_set("phase", to="later"), "phase is 'later'"),
        (_set("arguments", to={}), "the arguments are not those of rms_norm"),
        (_set("arguments", "eps", to=[1]), "argument eps is neither a value nor a tensor"),
        (_set("arguments", "eps", "value", to=[1]), "argument eps is no plain value"),
        (_set("arguments", "x", "dtype", to="load"), "argument x has dtype 'load'"),
        (_set("arguments", "x", "shape", to=[1, -2]), "argument x: 'shape' is not a list of sizes"),
        (_set("arguments", "x", "strides", to=[1]), "argument x has 2 axes and 1 strides"),
        (_set("arguments", "x", "strides", to=[10**9, 1]), "argument x does not lie inside its block"),
        (_set("arguments", "x", "offset", to=3), "argument x does not lie inside its block"),
        (_set("arguments", "x", "offset", to=-64), "argument x lies in no block"),
        (_set("arguments", "x", "block", to=99), "argument x lies in no block"),
        (_set("arguments", "x", "tensor", to="before/y"), "before/y is not in tensors.safetensors"),
        (_set("arguments", "x", "shape", to=[1, 1]), "argument x is torch.float32 [1, 1], its stored values"),
        (_set("blocks", to=[1 << 50]), "'blocks' is not a list of sizes in bytes"),
        (_set("blocks", to="all"), "'blocks' is not a list of sizes in bytes"),
        (_set("recorded", to=["nothing"]), "'recorded' is not a list of outputs of rms_norm"),
        (_set("recorded", to=["out"]), "recorded/out is not in tensors.safetensors"),
        (_set("dims", to={"dim": []}), "'dims': dim is '[]', not int"),
        (_set("dims", to={"dim": True}), "'dims': dim is 'True', not int"),
        (_set("dims", to={"dim": -5}), "'dims': dim is -5, not from 0 to 2^63 - 1"),
        (_set("dims", to={"dim": 1 << 63}), "'dims': dim is 9223372036854775808, not from 0"),
        (_set("dims", to={"more": [1]}), "'dims': more is '[1]', not int/float/str/bool/NoneType"),
        (lambda document, _: document.pop("dims"), "'dims' is missing"),
        (_set("dtype", to="float17"), "dtype is 'float17' (one of bfloat16, float32)"),
        (_set("seed", to=1 << 64), "'seed' is not an integer from 0 to 2^63 - 1"),
        (_set("seed", to=-1), "'seed' is not an integer from 0"),
        (_set("seed", to=True), "'seed' is not an integer"),
        (_set("arguments", "x", "strides", to=[10**30, 1]), "argument x: 'strides' reaches beyond any memory"),
        (_set("arguments", "x", "strides", to=[-1, 1]), "argument x: 'strides' is not a list of sizes"),
        (_set("arguments", "x", "shape", to=[1 << 40, 1 << 40]), "argument x: 'shape' is larger than any memory"),
        (_set("arguments", "x", "shape", to=[1, 10**30]), "argument x: 'shape' reaches beyond any memory"),
        (_set("blocks", to=[1 << 40] * 64), "blocks of 70368.7 GB do not fit into memory"),
        (_set("dims", to=[]), "'dims' is not an object"),
        (_set("seed", to="zero"), "'seed' is not an integer"),
        (_set("tags", to=[1]), "'tags' is not a list of words"),
    ],
)
def test_a_malformed_document_is_refused(
    case_of: MakeCase, tmp_path: Path, change: Callable[..., None], message: str
) -> None:
    path = tmp_path / "x.k3case"
    _rewrite(path, change, case_of("rms_norm", "plain", "float32"))
    with pytest.raises(InputError) as caught:
        load_case(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_case_without_the_dims_its_parts_are_told_by_is_refused(case_of: MakeCase, tmp_path: Path) -> None:
    path = tmp_path / "x.k3case"
    name = next(sample.name for sample in get_operator("latent_moe").samples() if "tiny" in sample.tags)
    _rewrite(path, _set("dims", to={}), case_of("latent_moe", name))
    with pytest.raises(InputError, match="'dims': no 'latent' as latent_moe needs"):
        load_case(path)


class _Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a case file was unpickled",))


def _zip(compression: int, **entries: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in entries.items():
                archive.writestr(name.replace("_", "."), data)

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "the case cannot be read: No such file"),
        (lambda path: path.write_bytes(b"PK\3\4 and no more"), "not a case file"),
        (lambda path: path.write_bytes(pickle.dumps(_Bomb())), "not a case file"),
        (_zip(zipfile.ZIP_STORED, case_json=b"{}"), "holds case.json"),
        (_zip(zipfile.ZIP_DEFLATED, case_json=b"{}", tensors_safetensors=b""), "the zip is compressed"),
        (_zip(zipfile.ZIP_STORED, case_json=b"{}", tensors_safetensors=b"\0" * 9), "tensors.safetensors cannot be"),
        (
            _zip(zipfile.ZIP_STORED, case_json=b"[", tensors_safetensors=safetensors.torch.save({})),
            "case.json is not JSON",
        ),
        (
            _zip(zipfile.ZIP_STORED, case_json=b"[]", tensors_safetensors=safetensors.torch.save({})),
            "not a JSON object",
        ),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, write: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "x.k3case"
    write(path)
    with pytest.raises(InputError) as caught:
        load_case(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused_wherever_it_ends(case_of: MakeCase, tmp_path: Path) -> None:
    path = save_case(case_of("rms_norm", "plain"), tmp_path / "x.k3case")
    whole = path.read_bytes()
    for end in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError):
            load_case(path)


def test_an_unwritable_place_is_an_error_of_one_line(case_of: MakeCase, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="the case cannot be written"):
        save_case(case_of("rms_norm", "plain"), tmp_path / "file" / "x.k3case")
