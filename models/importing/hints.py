"""Words that say something about pixels, wherever a stranger's files have them.

What is not read is looked through for them, so that nothing about pixels is passed over without a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

__all__ = ["hints_in", "is_about_pixels", "is_for_names", "names_a_colour_order", "words_of"]

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_ALONE = {
    *("mean", "means", "std", "stds", "scale", "rescale", "bgr", "rgb", "crop", "colour", "color", "grayscale"),
    *("greyscale", "resample", "interpolation", "resize", "normalize", "normalise", "normalization", "normalisation"),
    *("normalized", "normalised", "norm", "gamma", "transform", "transforms"),
}
"""Keys that are about pixels if they are nothing else."""
_ALWAYS = {
    *("bgr", "rgb", "rgba", "colour", "color", "colours", "colors", "grayscale", "greyscale"),
    *("rescale", "rescaling", "resize", "resizing", "resample", "resampling", "crop", "cropping", "letterbox"),
    *("transforms", "preprocess", "preprocessing", "preprocessor", "preproc", "interpolation"),
}
"""Words that mark any key as about pixels, except the words in `_INSIDE`."""
_NORMALISES = {"normalize", "normalise", "normalization", "normalisation", "normalized", "normalised", "normalizer"}
_STATISTICS = {"mean", "means", "std", "stds", "stdev", "var", "variance", *_NORMALISES}
_PICTURE = {"image", "images", "img", "input", "inputs", "pixel", "pixels", "data", "dataset", "channel", "channels"}
_PICTURE |= {"picture", "imagenet", "value", "values", "norm", "rgb"}
_OF_PICTURE = {"scale", "range", "transform", "processor", "processing", "process", "offset", "bias", "space"}
_ORDER = {"order", "flip", "reverse", "reversed", "swap"}
_INSIDE = {
    *("layer", "layers", "batch", "group", "groups", "weight", "weights", "feature", "features", "embedding"),
    *("embeddings", "embed", "output", "outputs", "qk", "query", "key", "attention", "attn", "before", "after", "head"),
    *("hidden", "logit", "logits", "position", "pos", "rope", "encoding", "act", "pooling", "router", "mask", "loss"),
    *("projection", "residual", "spectral", "instance", "token", "tokens", "text", "audio", "init", "initializer"),
}
"""Words of what happens inside a network."""
_OF_LAYERS = re.compile(r"(?i)^(batch|layer|group|instance|rms|none$)")


def words_of(key: str) -> list[str]:
    """Split a key into words in lower case. It may be written like `image_mean`, `imageMean` or `idx2label`."""
    return [word.lower() for word in _WORD.findall(key)]


_FOR_NAMES = {
    *("names", "labels", "classes", "classnames", "classlabels", "labelnames", "categories", "modelinfolabels"),
    *("id2label", "label2id", "idx2label", "label2idx", "idtolabel", "labeltoid", "idxtolabel", "labeltoidx"),
    *("classtoidx", "idxtoclass", "class2idx", "idx2class", "classtoid", "idtoclass", "class2id", "id2class"),
    *("indextolabel", "labeltoindex", "indextoclass", "classtoindex", "indextoname", "idtoname", "id2name"),
    *("classmapping", "classmap", "labelmapping", "labelmap", "classindices", "classindex"),
}
"""Keys under which files keep class names, without the marks between their words."""


def is_for_names(key: str) -> bool:
    """True for a key under which files keep class names."""
    return re.sub(r"[\s_.-]", "", key).lower() in _FOR_NAMES


def is_about_pixels(key: str) -> bool:
    """True if a key says something about pixels, and not about what happens inside a network."""
    words = words_of(key)
    said = set(words)
    if len(words) == 1:
        return bool(said & (_ALONE | _ALWAYS)) or key.lower().startswith("preproc")
    if {"pre", "process"} <= said or {"pre", "processing"} <= said or said & {"preprocess", "preprocessing"}:
        return True
    if said & _INSIDE:
        return False
    if said & _ALWAYS or said & _NORMALISES or said <= _STATISTICS:
        return True
    if said & _PICTURE and said & (_STATISTICS | _OF_PICTURE):
        return True
    if said & {"channel", "channels"} and said & _ORDER:
        return True
    return said in ({"scale", "factor"}, {"mean", "file"}, {"mean", "subtraction"}, {"subtract", "mean"})


def names_a_colour_order(value: str) -> bool:
    """True if a short value is RGB, BGR or the like."""
    words = words_of(value)
    return len(value) <= 40 and len(words) <= 3 and bool({"rgb", "bgr", "rgba", "bgra", "nv"} & set(words))


def hints_in(content: Any, passed: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths of the keys that say something about pixels, in the form `input.mean`.

    Args:
        content: content of a JSON file, whose size the reader bounds.
        passed: keys that are skipped at any depth, because they are read elsewhere. Class names are skipped too.
    """
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        path, value = left.pop()
        if isinstance(value, Mapping):
            for key, inner in value.items():
                name = f"{path}.{key}" if path else str(key)
                if key in passed or inner is None or is_for_names(str(key)):
                    continue
                if isinstance(key, str) and is_about_pixels(key) and not _is_layer(inner):
                    yield name
                else:
                    left.append((name, inner))
        elif isinstance(value, list | tuple):
            left += [(path, inner) for inner in value if isinstance(inner, Mapping | list | tuple | str)]
        elif isinstance(value, str) and path and names_a_colour_order(value):
            yield path


def _is_layer(value: Any) -> bool:
    """True for a kind of layer, such as the "batch_norm" of `normalization`."""
    return isinstance(value, str) and bool(_OF_LAYERS.match(value))
