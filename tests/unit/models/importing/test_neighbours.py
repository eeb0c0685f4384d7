"""Configuration files next to a network: what is understood of them, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.importing.neighbours import (
    check_exclusive,
    neighbour,
    others_about_pixels,
    pixels_by_clip,
    pixels_by_config,
    pixels_by_processor,
)
from models.importing.preprocess import PreprocessFacts
from tierkit.errors import DataError, InvalidInput

VIT = {"image_processor_type": "ViTImageProcessor", "size": 24, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CONVNEXT = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 24}, "resample": 3}
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": 24, "crop_size": 24}
TIMM = {"input_size": [3, 24, 24], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.75}


def written(folder: Path, content: Any, name: str = "preprocessor_config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    "content",
    [
        {"image_processor": VIT, "processor_class": "CLIPProcessor"},
        {"preprocessor_config": {"image_processor": VIT}},
        VIT
        | {
            "crop_size": None,
            "do_center_crop": None,
            "resample": None,
            "do_pad": False,
            "_valid_processor_keys": ["images"],
            "do_convert_rgb": None,
        },
        VIT | {"image_processor_type": "ViTImageProcessorFast", "data_format": "channels_first"},
    ],
    ids=["nested", "nested twice", "keys without effect", "fast"],
)
def test_other_forms_of_one_processor(tmp_path: Path, content: dict[str, Any]) -> None:
    plain = pixels_by_processor(written(tmp_path, VIT))
    other = pixels_by_processor(written(tmp_path, content))
    assert other.model_copy(update={"layout": None}) == plain
    assert (plain.size, plain.resize, plain.resample, plain.colour) == ((24, 24), "squash", "bilinear", "rgb")


def test_the_processor_of_texts_says_nothing_about_pixels(tmp_path: Path) -> None:
    path = written(tmp_path, {"processor_class": "CLIPProcessor"}, "processor_config.json")
    assert pixels_by_processor(path) == PreprocessFacts()


def test_one_mean_is_for_one_channel(tmp_path: Path) -> None:
    facts = pixels_by_processor(written(tmp_path, VIT | {"image_mean": [0.5], "image_std": [0.25]}))
    assert (facts.colour, facts.std) == ("grey", (0.25,) * 3)


def test_a_default_that_changed_between_versions_stays_open(tmp_path: Path) -> None:
    facts = pixels_by_processor(written(tmp_path, {key: CONVNEXT[key] for key in CONVNEXT if key != "resample"}))
    assert facts.resample is None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (VIT | {"gamma": 2.2}, "'gamma'"),
        (VIT | {"do_sharpen": True}, "'do_sharpen'"),
        (VIT | {"image_processor_type": "MyImageProcessor"}, "'MyImageProcessor'"),
        (VIT | {"image_processor_type": "ImageGPTImageProcessor"}, "'ImageGPTImageProcessor'"),
        (VIT | {"image_processor_type": "DonutImageProcessor"}, "'DonutImageProcessor'"),
        (VIT | {"image_processor_type": "Siglip2ImageProcessor"}, "'Siglip2ImageProcessor'"),
        (VIT | {"feature_extractor_type": "CLIPFeatureExtractor"}, "two classes"),
        (VIT | {"auto_map": {"AutoImageProcessor": "code.Mine"}}, "'auto_map'"),
        ({"size": 24, "image_mean": [0.5] * 3}, "'image_processor_type' is missing"),
        ({"feature_extractor_type": "Wav2Vec2FeatureExtractor"}, "'Wav2Vec2FeatureExtractor'"),
        (VIT | {"do_resize": False}, "'do_resize'"),
        (VIT | {"do_resize": None}, "'do_resize'"),
        (VIT | {"do_rescale": None}, "'do_rescale'"),
        (VIT | {"do_normalize": None}, "'do_normalize'"),
        (CLIP | {"do_center_crop": None}, "'do_center_crop'"),
        (CLIP | {"resample": None}, "'resample'"),
        ({"image_processor_type": "MobileViTImageProcessor", "do_flip_channel_order": None}, "'do_flip_channel_order'"),
        (VIT | {"size": {"shortest_edge": 24}}, "another size"),
        (VIT | {"size": {"shortest_edge": 24, "longest_edge": 99}}, "'longest_edge'"),
        (VIT | {"size": {"max_height": 24, "max_width": 24}}, "'max_height'"),
        (VIT | {"size": [24, 32]}, "'size'"),
        (VIT | {"size": "24"}, "'size'"),
        (VIT | {"size": -3}, "'size'"),
        (VIT | {"size": {"depth": 3}}, "'depth'"),
        (VIT | {"do_center_crop": True, "crop_size": 16}, "'do_center_crop'"),
        (VIT | {"resample": 9}, "'resample'"),
        (VIT | {"resample": "bilinear"}, "'resample'"),
        (VIT | {"do_normalize": "yes"}, "'do_normalize'"),
        (VIT | {"image_mean": "no"}, "'image_mean'"),
        (VIT | {"image_mean": [0.5, 0.5]}, "'image_mean'"),
        (VIT | {"image_std": [0, 1, 1]}, "std"),
        (VIT | {"rescale_factor": 0}, "'rescale_factor'"),
        (VIT | {"do_pad": True}, "'do_pad'"),
        (VIT | {"data_format": "sideways"}, "'data_format'"),
        (CLIP | {"size": 20}, "black borders"),
        (CLIP | {"do_center_crop": False}, "another size"),
        (CLIP | {"size": {"height": 32, "width": 40}}, "not a square"),
        (CLIP | {"crop_size": {"shortest_edge": 24}}, "'crop_size'"),
        (CONVNEXT | {"size": {"height": 24, "width": 24}}, "shortest edge"),
        (CONVNEXT | {"crop_pct": "0.9"}, "'crop_pct'"),
        (CONVNEXT | {"do_center_crop": True}, "'do_center_crop'"),
        ({"image_processor_type": "BeitImageProcessor", "size": 24}, "'do_center_crop' is missing"),
        ({"image_processor_type": "BeitImageProcessor", "do_center_crop": False}, "'size' is missing"),
        ({"image_processor_type": "PoolFormerImageProcessor", "crop_pct": None}, "'crop_pct'"),
        ({"image_processor_type": "MobileViTImageProcessor", "do_normalize": True, "size": 256}, "'do_normalize'"),
        ({"image_processor_type": "PPLCNetImageProcessor", "size_divisor": 32}, "'size_divisor'"),
        ({"image_processor": VIT, "image_mean": [0.1] * 3}, "'image_mean' is outside"),
        ("{", "JSON"),
        ("[]", "object"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(DataError, match=named) as caught:
        pixels_by_processor(written(tmp_path, content))
    assert "preprocessor_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "size", "said"),
    [
        ({"pretrained_cfg": TIMM}, None, {"size": (24, 24), "resize": "shortest-side", "resize_to": 32}),
        (TIMM, None, {"size": (24, 24), "resize": "shortest-side", "resize_to": 32}),
        ({"architecture": "x", **TIMM}, None, {"size": (24, 24), "resize": "shortest-side", "resize_to": 32}),
        (
            {"pretrained_cfg": TIMM | {"crop_mode": "squash"}},
            None,
            {"size": (24, 24), "resize": "squash", "resize_to": 32},
        ),
        (
            {"pretrained_cfg": TIMM | {"crop_mode": "squash", "crop_pct": 1}},
            None,
            {"size": (24, 24), "resize": "squash"},
        ),
        ({"pretrained_cfg": TIMM | {"interpolation": "bilinear"}}, None, {"resample": "bilinear"}),
        ({"pretrained_cfg": {}}, None, {"size": (224, 224), "resize_to": 256, "resample": "bicubic"}),
        ({"pretrained_cfg": TIMM, "model_args": {"in_chans": 1}}, None, {"colour": "grey"}),
        (
            {"pretrained_cfg": TIMM | {"test_input_size": [3, 32, 32], "test_crop_pct": 1.0}},
            (32, 32),
            {"size": (32, 32), "resize": "shortest-side", "resize_to": 32},
        ),
        (
            {"pretrained_cfg": TIMM | {"test_input_size": [3, 32, 32], "test_crop_pct": 1.0}},
            (24, 24),
            {"size": (24, 24), "resize_to": 32},
        ),
    ],
)
def test_timm(tmp_path: Path, content: dict[str, Any], size: tuple[int, int] | None, said: dict[str, Any]) -> None:
    facts = pixels_by_config(written(tmp_path, content, "config.json"), size)
    assert {name: getattr(facts, name) for name in said} == said


def test_the_processor_of_transformers_for_networks_of_timm(tmp_path: Path) -> None:
    content = {"image_processor_type": "TimmWrapperImageProcessor", "architecture": "x", "pretrained_cfg": TIMM}
    plain = pixels_by_config(written(tmp_path, {"pretrained_cfg": TIMM}, "config.json"), None)
    assert pixels_by_processor(written(tmp_path, content)) == plain
    with pytest.raises(DataError, match="TimmWrapper"):
        pixels_by_processor(written(tmp_path, {"image_processor_type": "TimmWrapperImageProcessor"}))


def test_a_configuration_that_is_not_of_timm_says_nothing_about_pixels(tmp_path: Path) -> None:
    for content in ({"architectures": ["ResNetForImageClassification"], "image_size": 224}, {"input_size": 3}, {}):
        assert pixels_by_config(written(tmp_path, content, "config.json"), None) == PreprocessFacts()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"gamma": 2.2}, "'gamma'"),
        ({"input_size": [4, 24, 24]}, "4 colours"),
        ({"input_size": [3, 24]}, "'input_size'"),
        ({"input_size": [3, 24, 32]}, "squares"),
        ({"crop_mode": "border"}, "'border'"),
        ({"crop_pct": 1.2}, "'crop_pct'"),
        ({"crop_pct": "0.9"}, "'crop_pct'"),
        ({"interpolation": "random"}, "'random'"),
        ({"mean": [0.5, 0.5]}, "mean"),
    ],
)
def test_what_is_not_understood_of_timm_is_named(tmp_path: Path, more: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=named) as caught:
        pixels_by_config(written(tmp_path, {"pretrained_cfg": TIMM | more}, "config.json"), None)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {"problem_type": "multi_label_classification"},
        {"problem_type": "regression"},
        {"function_to_apply": "sigmoid"},
    ],
)
def test_networks_whose_classes_do_not_exclude_each_other(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(content))):
        check_exclusive(written(tmp_path, content, "config.json"))


def test_a_broken_link_is_not_taken_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("nowhere")
    with pytest.raises(DataError, match="cannot read"):
        pixels_by_config(neighbour(tmp_path / "net.onnx", "config.json") or tmp_path, None)


def test_pixels_in_the_wrong_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="image_mean"):
        pixels_by_config(written(tmp_path, {"model_type": "vit", "image_mean": [0.5] * 3}, "config.json"), None)
    with pytest.raises(DataError, match="model_type"):
        pixels_by_config(written(tmp_path, {"model_type": "vit", "mean": [0.5] * 3}, "config.json"), None)


def test_files_lie_next_to_the_network_or_above_a_folder_called_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "other").mkdir()
    above = written(tmp_path, {}, "config.json")
    assert neighbour(tmp_path / "net.onnx", "config.json") == above
    assert neighbour(tmp_path / "onnx" / "net.onnx", "config.json") == above
    assert neighbour(tmp_path / "other" / "net.onnx", "config.json") is None
    monkeypatch.chdir(tmp_path / "onnx")
    assert neighbour(Path("net.onnx"), "config.json") == above
    near = written(tmp_path / "onnx", {}, "config.json")
    assert neighbour(tmp_path / "onnx" / "net.onnx", "config.json") == near


@pytest.mark.parametrize(
    ("network", "name", "named"),
    [
        ("net", "preprocessor.json", True),
        ("net", "preprocess.json", True),
        ("net", "image_processor_config.json", True),
        ("net", "video_preprocessor_config.json", True),
        ("net", "val_transforms.yaml", True),
        ("net", "Transform.yml", True),
        ("net", "pre-processing.toml", True),
        ("net", "preprocess.toml", True),
        ("net", "net.toml", True),
        ("net", "net_preprocess.json", True),
        ("net", "other_preprocess.json", False),
        ("net", "other.preprocess.toml", False),
        ("net", "net2-transforms.json", False),
        ("net2", "net_preprocess.json", False),
        ("net_int8", "net_preprocess.json", True),
        ("net", "other.toml", False),
        ("net", "transformer.json", False),
        ("net", "transforms.txt", False),
        ("net", "tokenizer_config.json", False),
        ("net", "preprocessor_config.json", False),
    ],
)
def test_files_that_are_about_pixels_by_their_name(tmp_path: Path, network: str, name: str, named: bool) -> None:
    for each in ("net", "net2", "other", "net_int8"):
        (tmp_path / f"{each}.onnx").touch()
    path = written(tmp_path, "", name)
    assert others_about_pixels(tmp_path / f"{network}.onnx") == ([path] if named else [])


OPEN_CLIP: dict[str, dict[str, Any]] = {
    "model_cfg": {"embed_dim": 512, "vision_cfg": {"image_size": 24}},
    "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3},
}


def test_open_clip(tmp_path: Path) -> None:
    facts = pixels_by_clip(written(tmp_path, OPEN_CLIP, "open_clip_config.json"))
    assert (facts.size, facts.resize, facts.resize_to, facts.resample) == ((24, 24), "shortest-side", 24, "bicubic")
    assert (facts.colour, facts.scale, facts.mean, facts.std) == ("rgb", 255, (0.5,) * 3, (0.25,) * 3)
    squash = {"size": [24, 24], "interpolation": "bilinear", "resize_mode": "squash", "mode": "RGB", "fill_color": 0}
    facts = pixels_by_clip(written(tmp_path, OPEN_CLIP | {"preprocess_cfg": squash}, "open_clip_config.json"))
    assert (facts.size, facts.resize, facts.resample) == ((24, 24), "squash", "bilinear")
    assert facts.mean is not None
    assert facts.mean[0] == pytest.approx(0.4815, abs=1e-4)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"gamma": 2.2}, "'gamma'"),
        ({"mode": "BGR"}, "'mode'"),
        ({"interpolation": "random"}, "'interpolation'"),
        ({"resize_mode": "longest"}, "'resize_mode'"),
        ({"size": 32}, "'image_size'"),
        ({"size": [24, 32]}, "size"),
        ({"size": "24"}, "size"),
        ({"mean": "no"}, "mean"),
    ],
)
def test_what_is_not_understood_of_open_clip_is_named(tmp_path: Path, more: dict[str, Any], named: str) -> None:
    content = OPEN_CLIP | {"preprocess_cfg": OPEN_CLIP["preprocess_cfg"] | more}
    with pytest.raises(DataError, match=named):
        pixels_by_clip(written(tmp_path, content, "open_clip_config.json"))
    with pytest.raises(DataError, match="preprocess_cfg"):
        pixels_by_clip(written(tmp_path, {}, "open_clip_config.json"))


USUAL: list[dict[str, Any]] = [
    {"architectures": ["ViTForImageClassification"], "model_type": "vit", "attention_probs_dropout_prob": 0.0}
    | {"encoder_stride": 16, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "initializer_range": 0.02}
    | {"layer_norm_eps": 1e-12, "num_channels": 3, "patch_size": 16, "qkv_bias": True, "image_size": 24}
    | {"pooler_act": "tanh", "transformers_version": "4.57.0", "id2label": {"0": "scale", "1": "crop"}},
    {"model_type": "resnet", "depths": [3, 4, 6, 3], "downsample_in_first_stage": False, "embedding_size": 64}
    | {"layer_type": "bottleneck", "num_channels": 3, "out_features": ["stage4"], "problem_type": None},
    {"model_type": "convnext", "drop_path_rate": 0.0, "layer_scale_init_value": 1e-6, "image_size": 24}
    | {"hidden_sizes": [96], "num_stages": 4, "label2id": {"scale": 0, "crop": 1}},
    {"model_type": "swin", "use_absolute_embeddings": False, "window_size": 7, "path_norm": True, "mlp_ratio": 4.0},
    {"model_type": "mobilenet_v2", "depth_multiplier": 1.0, "finegrained_output": True, "tf_padding": True}
    | {"output_stride": 32, "semantic_loss_ignore_index": 255, "layer_norm_eps": 0.001, "first_layer_is_expansion": 1},
    {"model_type": "beit", "use_mean_pooling": True, "use_mask_token": False, "pool_scales": [1, 2, 3, 6]}
    | {"layer_scale_init_value": 0.1, "auxiliary_concat_input": False, "use_shared_relative_position_bias": False},
    {"model_type": "efficientnet", "batch_norm_eps": 0.001, "pooling_type": "mean", "width_coefficient": 1.0},
    {"model_type": "dinov2", "layerscale_value": 1.0, "reshape_hidden_states": True, "torch_dtype": "float32"},
    {"model_type": "clip", "logit_scale_init_value": 2.6592, "vision_config": {"image_size": 224, "num_channels": 3}}
    | {"text_config": {"attention_dropout": 0.0, "initializer_factor": 1.0}},
    {"model_type": "swinv2", "attention_scale": 1.0, "qk_scale": None, "normalization": "batch_norm"}
    | {"normalize_before": True, "rope_scaling": {"factor": 2.0}, "interpolate_pos_encoding": True},
    {"architecture": "resnet50", "num_classes": 10, "global_pool": "avg", "num_features": 2048}
    | {"pretrained_cfg": TIMM | {"pool_size": [7, 7], "first_conv": "conv1", "tag": "a1_in1k", "license": "mit"}}
    | {"model_args": {"img_size": 24, "in_chans": 3}, "label_names": ["red", "blue"]},
]


@pytest.mark.parametrize("content", USUAL, ids=[each.get("model_type", "timm") for each in USUAL])
def test_the_inside_of_a_network_is_not_taken_for_pixels(tmp_path: Path, content: dict[str, Any]) -> None:
    pixels_by_config(written(tmp_path, content, "config.json"), (24, 24), 3)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"preprocessing": {"mean": 0}}, "'preprocessing'"),
        ({"transforms": []}, "'transforms'"),
        ({"transform": {}}, "'transform'"),
        ({"input": {"mean": [1]}}, "'input.mean'"),
        ({"input": {"color": "BGR"}}, "'input.color'"),
        ({"input": [{"std": 1}]}, "'input.std'"),
        ({"input": {"format": "BGR"}}, "'input.format'"),
        ({"default_cfg": TIMM}, "'default_cfg"),
        ({"pretrained_cfgs": {"a": {}}}, "'pretrained_cfgs"),
        ({"bgr": True}, "'bgr'"),
        ({"input_normalization": "imagenet"}, "'input_normalization'"),
        ({"preprocess_input": "caffe"}, "'preprocess_input'"),
        ({"pretrained_cfg": TIMM, "img_mean": [0.5] * 3}, "'img_mean'"),
        ({"pretrained_cfg": TIMM, "mean": [0.1] * 3}, "'mean'"),
        ({"a": {"b": {"c": {"pixelStd": 1}}}}, "'a.b.c.pixelStd'"),
        ({"scale": 1}, "'scale'"),
        ({"rescale": 1}, "'rescale'"),
        ({"normalize": True}, "'normalize'"),
        ({"mean_values": [1, 2, 3]}, "'mean_values'"),
        ({"center_crop": 24}, "'center_crop'"),
        ({"channel_order": "xyz"}, "'channel_order'"),
        ({"colour_order": "xyz"}, "'colour_order'"),
        ({"interpolation": "nearest"}, "'interpolation'"),
        ({"pixel_range": [0, 1]}, "'pixel_range'"),
        ({"num_channels": 1}, "num_channels"),
        ({"image_size": 32}, "image_size"),
        ({"image_size": [24, 32]}, "image_size"),
        ({"image_size": {"height": 32, "width": 24}}, "image_size"),
    ],
)
def test_what_a_configuration_says_of_pixels_and_is_not_read_is_named(
    tmp_path: Path, content: dict[str, Any], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        pixels_by_config(written(tmp_path, {"model_type": "vit", **content}, "config.json"), (24, 24), 3)
