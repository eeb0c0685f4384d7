"""The attacks: they find what is to be found, and nothing where there is nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import torch

from encryption.audit.decoder import InversionDecoder, Lessons, check_shapes, reconstruct, train_decoder
from encryption.audit.rows import Subject
from encryption.audit.run import Budget, run_audit
from encryption.audit.sheet import draw_sheet
from encryption.audit.similarity import mean_ssim, psnr_db
from encryption.audit.surrogate import Overheard, train_surrogate
from encryption.audit.target import Target
from encryption.audit.whitebox import Arrived, Search, is_linear, least_squares, optimise
from encryption.features import pack
from models.data import ImageSet, read_sample
from models.export.dequantize import dequantize_onnx
from models.manifest import load_manifest, weights_folder
from models.session import load_encoder, load_model
from models.split import extract_part
from models.training.onnx_network import OnnxNetwork
from tierkit.errors import DataError, NotFound
from tierkit.types import EncoderKind, FeatureForm
from tierkit.wire.oip.compression import decompress

pytestmark = pytest.mark.train

NETWORKS = ("resnet-34", "wrn-16-4")
SHAPE = (32, 32, 3)


@pytest.fixture(scope="module")
def sample() -> ImageSet:
    return read_sample()


def target_of(name: str, form: str = "uint8") -> Target:
    manifest = load_manifest()
    encoder, folder = manifest.encoder(f"{name}.conv1"), weights_folder()
    return Target(
        encoder=encoder,
        form=form,
        head=load_encoder(encoder, manifest.entry(name), "head"),
        head_file=(folder / encoder.head.file).read_bytes(),
        seed=0,
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_in_torch_computes_what_the_runtime_computes(name: str, sample: ImageSet):
    target, entry, images = target_of(name), load_manifest().entry(name), sample.images[:20]
    features = target.head.run({"images": images}, ["features"])["features"]
    np.testing.assert_allclose(target.open_head().run(images), features, atol=1e-4)
    logits = load_model(entry, part="tail").run({"features": features}, ["logits"])["logits"]
    # INT8 inside: a value between two levels may go either way.
    tail_file = extract_part((weights_folder() / entry.file).read_bytes(), "tail")
    assert np.abs(OnnxNetwork(tail_file).run(features) - logits).max() < 1
    floats = OnnxNetwork(dequantize_onnx(tail_file)).run(features)
    assert np.mean(floats.argmax(axis=1) == logits.argmax(axis=1)) >= 0.9


def test_what_an_attacker_imitates_is_what_arrives(sample: ImageSet):
    target = target_of("wrn-16-4")
    features = target.head.run({"images": sample.images[:4]}, ["features"])["features"]
    own = torch.from_numpy(features).requires_grad_()
    imitated = target.imitate(own)
    np.testing.assert_allclose(imitated.detach().numpy(), target.send(sample.images[:4]), atol=1e-5)
    (gradient,) = torch.autograd.grad(imitated.sum(), own)
    assert target.bounds is not None
    within = (own > target.bounds[0] + target.encoder.scale) & (own < target.bounds[1] - target.encoder.scale)
    assert (gradient[within] == 1).all()
    assert (gradient[own < target.bounds[0] - target.encoder.scale] == 0).all()


def test_noise_is_part_of_what_arrives(sample: ImageSet):
    plain = target_of("wrn-16-4", "float32")
    # Levels that reach as far as the features do: with noise they are rounded in this form, too.
    wide = {"noise": 0.5, "scale": 0.2, "zero_point": 128}
    noisy = replace(plain, encoder=plain.encoder.model_copy(update=wide))
    difference = noisy.send(sample.images[:4]) - plain.send(sample.images[:4])
    assert difference.std() == pytest.approx(0.5, rel=0.05)
    assert noisy.deviation == pytest.approx(0.5, rel=0.01)
    assert noisy.payload(sample.images[:4]) != plain.payload(sample.images[:4])


@pytest.mark.anyio
async def test_what_is_timed_starts_no_event_loop(sample: ImageSet):
    target, images = target_of("wrn-16-4"), sample.images[:4]
    features = target.head.run({"images": images}, ["features"])["features"]
    packed = pack(target.encoder, features, FeatureForm.UINT8).tobytes()
    assert await decompress(target.payload(images), len(packed)) == packed


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("form", "least"), [("uint8", 0.95), ("float32", 0.99)])
def test_least_squares_inverts_a_first_convolution(name: str, form: str, least: float, sample: ImageSet):
    target, images = target_of(name, form), sample.images[:4]
    head = target.open_head()
    assert is_linear(head, SHAPE)
    found = least_squares(head, target, target.send(images), 100)
    assert mean_ssim(images, found) > least
    # Where the features say nothing of the image there is nothing to find.
    shuffled = np.random.default_rng(0).permuted(target.send(images), axis=3)
    wrong = least_squares(head, target, shuffled, 100)
    assert mean_ssim(images, wrong) < 0.5


def test_a_head_with_a_rectifier_is_not_linear(sample: ImageSet):
    whole = OnnxNetwork((weights_folder() / "wrn-16-4.int8.onnx").read_bytes())
    assert not is_linear(whole, SHAPE)


def test_optimisation_takes_the_start_that_does_better_on_its_own_images(sample: ImageSet):
    target = target_of("wrn-16-4")
    images, own = sample.images[:2], sample.images[100:102]
    near = [np.clip(pictures.astype(int) + 6, 0, 255).astype(np.uint8) for pictures in (images, own)]
    found, setting = optimise(
        target,
        Arrived(features=target.send(images), starts={"a hint": near[0]}),
        (own, Arrived(features=target.send(own), starts={"a hint": near[1]})),
        Search(steps=20, own_images=2),
    )
    assert "a hint" in setting
    assert (psnr_db(images, found) or np.inf) > (psnr_db(images, near[0]) or np.inf)


@pytest.mark.parametrize(("channels", "side"), [(8, 8), (64, 16), (16, 32), (32, 4)])
def test_a_decoder_fits_features_of_any_size(channels: int, side: int):
    sent = torch.randn(4, channels, side, side)
    check_shapes(sent.shape[1:], SHAPE)
    assert InversionDecoder(sent, np.zeros((4, *SHAPE), np.uint8))(sent).shape == (4, 3, 32, 32)


@pytest.mark.parametrize(
    ("features", "image"),
    [
        ((8, 149, 149), (299, 299, 3)),
        ((8, 32, 16), (32, 32, 3)),
        ((8, 32, 48), (32, 48, 3)),
        ((8, 11, 11), (33, 33, 3)),
    ],
)
def test_shapes_without_a_decoder_are_refused(features: tuple[int, ...], image: tuple[int, ...]):
    with pytest.raises(DataError, match=f"features of {features[1]} x {features[2]} and pictures of {image[0]}"):
        check_shapes(features, image)


def test_a_decoder_begins_with_what_a_linear_map_can_do(sample: ImageSet):
    images = sample.images[:300]
    mixing = np.random.default_rng(0).normal(size=(12, 12)).astype(np.float32)

    def send(images: np.ndarray) -> np.ndarray:
        blocks = images.reshape(-1, 16, 2, 16, 2, 3).transpose(0, 2, 4, 5, 1, 3).reshape(-1, 12, 16, 16)
        return np.asarray(np.einsum("dc,nchw->ndhw", mixing, blocks.astype(np.float32)))

    taught = train_decoder(images, send, Lessons(images=10_000, enough=0.95), 0)
    assert taught.ssim > 0.95
    assert taught.shown <= 256


def test_a_decoder_learns_what_no_linear_map_finds(sample: ImageSet):
    def send(images: np.ndarray) -> np.ndarray:
        blurred = images.reshape(-1, 8, 4, 8, 4, 3).mean(axis=(2, 4)).transpose(0, 3, 1, 2)
        return np.asarray(np.abs(blurred - 128), dtype=np.float32)

    told: list[tuple[int, int]] = []
    taught = train_decoder(
        sample.images, send, Lessons(images=2560, enough=1.0), 0, lambda done, of: told.append((done, of))
    )
    linear = train_decoder(sample.images, send, Lessons(images=1, enough=-1.0), 0)
    # A decoder that learns nothing stays what the linear map is.
    assert taught.ssim > linear.ssim + 0.005
    assert told[-1] == (20, 20)
    held = sample.images[-250:]
    assert mean_ssim(held, reconstruct(taught.decoder, send(held))) == pytest.approx(taught.ssim, abs=0.02)


def test_a_head_of_ones_own_comes_to_spread_its_values_as_the_other_does(sample: ImageSet):
    target = target_of("wrn-16-4")
    overheard = target.send(sample.images[:100])
    surrogate = target.surrogate(0)
    own = sample.take(np.arange(500, len(sample)))

    def apart() -> float:
        ours = target.transmit(surrogate.run(own.images[:100]))
        return float(
            np.abs(np.quantile(ours, (0.5, 0.9), (0, 2, 3)) - np.quantile(overheard, (0.5, 0.9), (0, 2, 3))).mean()
        )

    first = apart()
    means = np.zeros((100, *overheard.shape[1:]), np.float32) + overheard.mean(axis=0)
    train_surrogate(surrogate, target, own, Overheard(features=overheard, means=means, steps=10, seed=0))
    assert apart() < 0.5 * first


def test_the_audit_runs_each_attack_and_says_whether_it_counts(sample: ImageSet, tmp_path: Path):
    tiny = Budget(
        images=8,
        searched_images=2,
        equations=60,
        search=Search(steps=2, own_images=2),
        lessons=Lessons(images=256, enough=1.0),
        imitation_steps=2,
        overheard=20,
        test_images=50,
    )
    manifest = load_manifest()
    entry = manifest.entry("wrn-16-4")
    halves = sample.take(np.arange(500)), sample.take(np.arange(500, 1000))
    subjects = [
        Subject(kind=None, network=entry, form="pixels"),
        Subject(kind=EncoderKind.CONV1, network=entry, form="uint8"),
    ]
    told: list[str] = []
    found = run_audit(
        subjects, manifest, weights_folder(), *halves, tiny, seed=0, tell=lambda what, done, of: told.append(what)
    )
    assert [(row.encoder, row.attack) for row in found.rows] == [
        ("none", "none"),
        ("conv1", "least-squares"),
        ("conv1", "black-box"),
        ("conv1", "optimisation"),
        ("conv1", "query-free"),
    ]
    assert [row.counts for row in found.rows] == [row.ssim >= 0.9 for row in found.rows]
    assert found.rows[1].counts
    assert found.rows[0].psnr_db is None
    assert found.rows[1].judge == "resnet-34"
    assert 0 < found.rows[1].payload_bytes <= 16_384
    assert [row.images for row in found.rows] == [8, 8, 8, 2, 8]
    assert len(set(told)) == 8
    draw_sheet([("one\nlabel", found.originals), ("two", found.reconstructions[3])], tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_an_audit_without_enough_images_or_without_the_encoder_is_refused(sample: ImageSet):
    manifest = load_manifest()
    subject = Subject(kind=EncoderKind.CONV1, network=manifest.entry("wrn-16-4"), form="uint8")
    with pytest.raises(DataError, match="this audit needs 9 test"):
        run_audit([subject], manifest, weights_folder(), sample, sample.take(np.arange(8)), Budget.quick(9), seed=0)
    unlabelled = replace(sample, fine=None)
    with pytest.raises(DataError, match="labelled"):
        run_audit([subject], manifest, weights_folder(), unlabelled, sample, Budget.quick(9), seed=0)
    elsewhere = replace(subject, kind=EncoderKind.CONV1, network=manifest.entry("mobilenet-v1-0.5"))
    with pytest.raises(NotFound, match=r"no encoder 'mobilenet-v1-0.5.conv1'"):
        run_audit(
            [elsewhere], manifest, weights_folder(), sample, sample, replace(Budget.quick(9), overheard=9), seed=0
        )
