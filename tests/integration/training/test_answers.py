"""Students on many machines: workers get the teacher's answers with the images or from a file, and learn the same."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.training.conftest import CONFIG, StartHost
from tierkit.errors import InvalidInput, SetupError
from training.worker.finding import at
from training.worker.node import WorkerOptions, work

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(300)]

STUDENT = '[teacher]\nruns = ["big"]\nweight = 0.9\n'


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> tuple[Path, Path]:
    """Configuration of a student that starts from a run, and the answers of its teacher; both runs are in `runs`."""
    folder = tmp_path_factory.mktemp("taught")
    where = ["--dataset", str(shapes), "--runs", str(folder / "runs")]
    for name in ("big", "first"):
        (folder / f"{name}.toml").write_text(CONFIG.format(epochs=2).replace('"net"', f'"{name}"'))
        train = ["models", "train", name, "--config", str(folder / f"{name}.toml"), "--threads", "1"]
        assert run([*train, *where]) == 0
    answers = folder / "answers.safetensors"
    assert run(["models", "answers", "big", "--out", str(answers), *where]) == 0
    config = folder / "net.toml"
    config.write_text(CONFIG.format(epochs=2).replace("epochs", 'initial = "first"\nepochs', 1) + STUDENT)
    return config, answers


def options(url: str, shapes: Path, cache: Path, **changes: object) -> WorkerOptions:
    given = {"find_host": at(url), "name": "one", "dataset": str(shapes), "threads": 1, "cache": cache, **changes}
    return WorkerOptions(**given)  # type: ignore[arg-type]


async def test_all_ways_to_the_answers_teach_the_same(
    start_host: StartHost, shapes: Path, taught: tuple[Path, Path], tmp_path: Path
) -> None:
    config, answers = taught
    weights = {}
    for way in ("file", "all"):
        settings = {"network": str(config), "answers": answers, "runs": config.parent / "runs", "share_data": True}
        async with start_host(folder=tmp_path / way, strategy="downpour", workers=1, **settings) as running:
            if way == "file":
                with pytest.raises(InvalidInput, match="--answers"):
                    await work(options(running.url, shapes, tmp_path))
            ways = {"answers": answers} if way == "file" else {"fetch": way}
            done = await work(options(running.url, shapes, tmp_path / "cache", **ways))
            assert done.updates > 0
            weights[way] = (await running.host.weights())[1]
    assert weights["file"] == weights["all"]


async def test_a_worker_with_some_segments_learns_from_their_answers(
    start_host: StartHost, shapes: Path, taught: tuple[Path, Path], tmp_path: Path
) -> None:
    config, answers = taught
    settings = {"network": str(config), "answers": answers, "runs": config.parent / "runs", "share_data": True}
    async with start_host(workers=1, **settings) as running:
        assert running.host.shared.manifest.answers_sha256 == running.host.spec.answers_sha256
        done = await work(options(running.url, shapes, tmp_path / "cache", fetch="own"))
        assert done.updates > 0


async def test_a_host_refuses_a_student_without_the_answers_of_its_teacher(
    start_host: StartHost, shapes: Path, taught: tuple[Path, Path], tmp_path: Path
) -> None:
    config, answers = taught
    runs = config.parent / "runs"
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "net.toml"
    other.write_text(config.read_text().replace('["big"]', '["other"]'))
    for settings, said in (
        ({"network": str(config)}, "terrace models answers big"),
        ({"network": str(other), "answers": answers}, "teacher of 'net' is other"),
        ({"network": str(config), "answers": config}, "make it again"),
    ):
        with pytest.raises(SetupError, match=said):
            async with start_host(runs=runs, **settings):
                pass
