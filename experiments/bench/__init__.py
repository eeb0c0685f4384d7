"""Load generator for Open Inference Protocol servers and Terrace's own endpoints: closed and open loop, one core.

    target = await oip_target("http://127.0.0.1:8000", "mobilenet", InputPlan(batch_size=50))
    level = await measure(target, Closed(4), Plan(window_s=5.0), asyncio.Event())
    level.summary.images_per_s, level.summary.latency_ms["p99"]

The command is `terrace bench`; `docs/benchmarking.md` says how to read what it prints.
"""
