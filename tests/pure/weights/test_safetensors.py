"""safetensors files are mapped: the right values, only what is used is read, and bad files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import raycollect as col
from raycollect import errors
from raycollect.weights.safetensors import _DTYPES, INDEX
from tests.pure.weights.files import NAMES, resident, write


def some(dtype, shape):
    return (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)


EVERY = {name: some(dtype, (3, 5)) for name, dtype in _DTYPES.items()}


def assert_equal(actual, expected):
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape)
        assert actual[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("align", [1, 8])
def test_every_dtype_and_shape(tmp_path, align):
    tensors = EVERY | {"number": np.array(7, np.int64), "none": np.zeros((0, 4), np.float32)}
    mapped = col.map_safetensors(write(tmp_path / "model.safetensors", tensors, align))
    assert_equal(mapped, tensors)
    assert not any(array.flags.writeable for array in mapped.values())
    assert {type(array) for array in mapped.values()} == {np.ndarray}


@pytest.mark.parametrize("shape", [[1] * 100, [1 << 62, 0]])
def test_a_shape_that_numpy_does_not_take_is_refused(tmp_path, shape):
    nbytes = 4 * int(np.prod(shape, dtype=object))
    text = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    with pytest.raises(errors.InvalidArgumentError, match="a shape that numpy takes"):
        col.map_safetensors(path)


def test_a_file_that_is_replaced_while_it_is_mapped_is_the_one_or_the_other(tmp_path, monkeypatch):
    path = write(tmp_path / "model.safetensors", {"x": np.ones(4, np.float32)})
    other = write(tmp_path / "other", {"x": np.zeros(400, np.float32)})
    opened = Path.open

    def open_then_replace(self, *args):
        file = opened(self, *args)
        other.replace(path)
        return file

    monkeypatch.setattr(Path, "open", open_then_replace)
    assert_equal(col.map_safetensors(path), {"x": np.ones(4, np.float32)})


def test_the_library_of_the_format_reads_and_writes_the_same(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    values = {
        name: torch.arange(15).reshape(3, 5).to(getattr(torch, dtype.name if dtype.name != "bool" else "bool"))
        for name, dtype in _DTYPES.items()
    }
    library.save_file(values, tmp_path / "theirs.safetensors")
    mapped = col.map_safetensors(tmp_path / "theirs.safetensors")
    assert {name: array.tobytes() for name, array in mapped.items()} == {
        name: value.view(torch.uint8).numpy().tobytes() for name, value in values.items()
    }
    ours = library.load_file(write(tmp_path / "ours.safetensors", EVERY))
    assert {name: value.view(torch.uint8).numpy().tobytes() for name, value in ours.items()} == {
        name: array.tobytes() for name, array in EVERY.items()
    }


def test_several_files(tmp_path):
    first, two = {"a": some("f4", (2, 3)), "b": some("f4", (4,))}, {"c": some("i8", (5,))}
    write(tmp_path / "1.safetensors", first)
    write(tmp_path / "2.safetensors", two)
    assert_equal(col.map_safetensors(tmp_path), first | two)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"c": "2.safetensors", "a": "1.safetensors"}}))
    assert_equal(col.map_safetensors(str(tmp_path)), two | {"a": first["a"]})
    assert_equal(col.map_safetensors(tmp_path / INDEX), two | {"a": first["a"]})


def test_what_is_not_used_is_not_read(tmp_path):
    path = write(tmp_path / "model.safetensors", {"big": np.ones(16 << 20, np.uint8), "used": np.ones(1 << 20, "u1")})
    mapped = col.map_safetensors(path)
    assert resident(path) <= 1 << 17
    assert mapped["used"].sum() == 1 << 20
    assert 1 << 20 <= resident(path) <= (1 << 20) + (1 << 18)


def a_file(header, size=8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(size)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD = {
    "cut off": (a_file({"a": entry()}, size=7), "whole file"),
    "too long": (a_file({"a": entry()}, size=9), "gap or an overlap"),
    "gap": (a_file({"a": entry(), "b": entry(offsets=(12, 20))}, size=20), "gap or an overlap"),
    "overlap": (a_file({"a": entry(), "b": entry(offsets=(4, 12))}, size=12), "gap or an overlap"),
    "twice": (a_file({"a": entry(), "b": entry()}), "where another tensor is"),
    "empty": (b"", "header"),
    "no header": (a_file({}, length=1 << 40), "header"),
    "no JSON": (a_file(b"{]"), "no JSON"),
    "no object": (a_file([1]), "a list"),
    "no entry": (a_file({"a": 3}), "data_offsets"),
    "half an entry": (a_file({"a": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
    "dtype": (a_file({"a": entry(["F4"])}), "names"),
    "shape": (a_file({"a": entry(shape=(3,))}), r"shape \[3\] in bytes 0 to 8"),
    "no list": (a_file({"a": {**entry(), "shape": "22"}}), "a list of extents"),
    "name": (a_file({"\ud800": entry()}), "Unicode"),
    "rank": (a_file({"a": entry(shape=(1 << 60,) * 600_000)}), "at most 64 extents"),
    "extents": (a_file({"a": entry(shape=(1 << 4000,) * 64)}), "at most 64 extents"),
    "offsets": (a_file({"a": entry(offsets=(1 << 4000, 1 << 4001))}), "below 2"),
    "backwards": (a_file({"a": entry("F4", offsets=(8, 0))}), "as many bytes"),
    "many": (a_file({f"a{at}": entry(shape=(1 << 60,) * 64) for at in range(15_000)}), "as many bytes"),
    "long name": (a_file({"a" * 10_000_000: entry(shape=(3,))}), "as many bytes"),
    "negative": (a_file({"a": entry(shape=(-1, -2))}), "shape"),
    "fraction": (a_file({"a": entry(shape=(2.0,))}), "shape"),
    "deep": (a_file(b"[" * 100_000), "JSON"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused(tmp_path, what):
    data, text = BAD[what]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(errors.InvalidArgumentError, match=text):
        col.map_safetensors(path)


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(errors.InvalidArgumentError, match="without any"):
        col.map_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError):
        col.map_safetensors(tmp_path / "none.safetensors")
    write(tmp_path / "1.safetensors", {"a": some("f4", (2,))})
    write(tmp_path / "2.safetensors", {"a": some("f4", (2,))})
    with pytest.raises(errors.InvalidArgumentError, match="each tensor in one file"):
        col.map_safetensors(tmp_path)
    for index, text in (
        ({"weight_map": {"b": "1.safetensors"}}, "without 'b'"),
        ({"weight_map": {"a": "../1.safetensors"}}, "its own folder"),
        ({"weight_map": {"a": ".."}}, "its own folder"),
        ({"weight_map": {"a": ""}}, "its own folder"),
        ({"weight_map": {"a": "x\0y"}}, "its own folder"),
        ({"weight_map": {"a": "\ud800"}}, "its own folder"),
        ({"weight_map": {"a": 1}}, "its own folder"),
        ({}, "weight_map"),
    ):
        (tmp_path / INDEX).write_text(json.dumps(index))
        with pytest.raises(errors.InvalidArgumentError, match=text):
            col.map_safetensors(tmp_path)


def test_names_of_dtypes_are_those_of_the_library():
    names = {dtype.name for dtype in _DTYPES.values()}
    assert names >= {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
    assert np.dtype(ml_dtypes.bfloat16) in NAMES


def test_tensors_that_numpy_can_not_have_are_left_out_and_named(tmp_path):
    """As the scales and weights of 4 bits of large models."""
    header = {
        "w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "x": entry(offsets=(2, 10)),
        "scale": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [10, 12]},
        "y": {"dtype": "F99", "shape": [4], "data_offsets": [12, 13]},
    }
    (tmp_path / "1.safetensors").write_bytes(a_file(header, size=13))
    for names in (header, ["w", "scale"]):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "1.safetensors")}))
        with pytest.warns(UserWarning, match=r"'w' \('F4'\)") as caught:
            mapped = col.map_safetensors(tmp_path)
        assert ("F99" in str(caught[0].message)) == ("y" in names)
        assert list(mapped) == [name for name in names if name in ("x", "scale")]
    assert mapped["scale"].dtype == ml_dtypes.float8_e8m0fnu
    (tmp_path / "1.safetensors").write_bytes(a_file(header, size=14))
    with pytest.raises(errors.InvalidArgumentError, match="gap or an overlap"):
        col.map_safetensors(tmp_path)


@pytest.mark.parametrize("path", [None, 1, b"file", ["file"], "x\0y", "\ud800"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(errors.InvalidArgumentError, match="path is"):
        col.map_safetensors(path)
