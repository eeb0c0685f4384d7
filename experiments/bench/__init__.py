"""Load generator for the answers of a fleet: closed and open loop, on one core.

    target = await classify_target("http://127.0.0.1:8070", RequestPlan(batch_size=50))
    level = await measure(target, Closed(4), LoadPlan(window_s=5.0), asyncio.Event())
    level.summary.images_per_s, level.summary.latency_ms["p99"]

The command is `terrace bench`; see `docs/how-to/benchmarking.md`.
"""
