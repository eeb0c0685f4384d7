"""A job from its submission to its results, over real sockets."""

from __future__ import annotations

import numpy as np

from models.hierarchy import bundled_hierarchy


async def test_mapping_answers_every_image_coarse_then_fine(kit, scheduler):
    async with (
        kit.end(scheduler, "end-0") as first,
        kit.end(scheduler, "end-1") as second,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        job = await scheduler.submit(kit.images(230), labels=np.arange(230) % 100, name="all")
        view = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert view["state"] == "completed"
    assert view["reason"] == ""
    assert (view["tasks"], view["images"]) == (5, 230)
    assert view["answered_coarse"] == view["answered_fine"] == 230
    assert (view["fallback"], view["failed_images"]) == (0, 0)
    assert view["fine_accuracy"] == view["coarse_accuracy"] == view["coarse_from_fine_accuracy"] == 1.0
    assert view["mapping"] == {"end-0": "edge-0", "end-1": "cloud-0"}
    assert view["by_node"]["end-0"]["coarse_images"] + view["by_node"]["end-1"]["coarse_images"] == 230
    assert view["by_node"]["edge-0"]["fine_images"] + view["by_node"]["cloud-0"]["fine_images"] == 230
    assert view["fine_p99_ms"] >= view["coarse_p50_ms"] > 0
    assert sorted(first.tasks + second.tasks) == [f"{job['id']}-{k}" for k in range(5)]
    assert [result["index"] for result in results] == list(range(230))
    hierarchy = bundled_hierarchy()
    for index, result in enumerate(results):
        assert result["fine"]["label"] == hierarchy.fine[index % 100] == result["true_fine"]
        assert result["coarse"]["label"] == hierarchy.coarse[hierarchy.parent[index % 100]] == result["true_coarse"]
        assert result["request_id"] == f"{job['id']}-{index // 50}"
