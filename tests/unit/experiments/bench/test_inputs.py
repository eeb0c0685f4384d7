"""What is sent."""

import numpy as np
import pytest

from experiments.bench.inputs import InputPlan, make_inputs
from tierkit.errors import InvalidInput
from tierkit.tensors import TensorSpec

IMAGES = TensorSpec(name="images", datatype="UINT8", shape=(-1, 8, 8, 3))


def test_random_images_differ_from_request_to_request_and_use_the_whole_range() -> None:
    sets = make_inputs([IMAGES], InputPlan(batch_size=5))
    assert len(sets) == 16
    first, second = sets[0]["images"], sets[1]["images"]
    assert first.shape == (5, 8, 8, 3)
    assert first.dtype == np.uint8
    assert first.max() > 250
    assert not np.array_equal(first, second)
    again = make_inputs([IMAGES], InputPlan(batch_size=5))
    assert np.array_equal(first, again[0]["images"])


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("FP32", "float32"), ("INT64", "int64"), ("INT8", "int8"), ("BOOL", "bool")]
)
def test_every_datatype_can_be_sent(datatype: str, dtype: str) -> None:
    [array] = make_inputs([TensorSpec(name="x", datatype=datatype, shape=(-1, 4))], InputPlan(batch_size=2))[0].values()
    assert (array.dtype.name, array.shape) == (dtype, (2, 4))


def test_strings_are_bytes_objects() -> None:
    array = make_inputs([TensorSpec(name="x", datatype="BYTES", shape=(-1, 2))], InputPlan())[0]["x"]
    assert array.shape == (1, 2)
    assert all(isinstance(item, bytes) for item in array.reshape(-1))


def test_large_requests_are_few() -> None:
    wide = TensorSpec(name="x", datatype="UINT8", shape=(-1, 16 * 2**20))
    assert len(make_inputs([wide], InputPlan(batch_size=2))) == 2


@pytest.mark.parametrize(("binary", "images"), [(True, 2**28 // 192), (False, 2**24 // 192)])
def test_a_request_that_no_memory_holds_is_refused_before_it_is_made(binary: bool, images: int) -> None:
    with pytest.raises(InvalidInput, match=f"which {images:,} images fill"):
        make_inputs([IMAGES], InputPlan(batch_size=10**15, binary_inputs=binary))
    with pytest.raises(InvalidInput, match=f"a request of {images + 1:,} images"):
        make_inputs([IMAGES], InputPlan(batch_size=images + 1, binary_inputs=binary))


def test_an_open_size_must_be_given() -> None:
    open_size = TensorSpec(name="images", datatype="UINT8", shape=(-1, -1, -1, 3))
    with pytest.raises(InvalidInput, match="--shape images:N,N,3"):
        make_inputs([open_size], InputPlan())
    array = make_inputs([open_size], InputPlan(shapes={"images": (6, 7, 3)}))[0]["images"]
    assert array.shape == (1, 6, 7, 3)


def test_a_size_for_an_input_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'foo', and this model takes 'images'"):
        make_inputs([IMAGES], InputPlan(shapes={"foo": (3,)}))


def test_a_model_without_a_batch_axis_takes_no_batch() -> None:
    fixed = TensorSpec(name="x", datatype="FP32", shape=(3, 4))
    assert make_inputs([fixed], InputPlan())[0]["x"].shape == (3, 4)
    with pytest.raises(InvalidInput, match="no batch of 2"):
        make_inputs([fixed], InputPlan(batch_size=2))


def test_unknown_datatypes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="BF16"):
        make_inputs([TensorSpec(name="x", datatype="BF16", shape=(-1, 4))], InputPlan())
