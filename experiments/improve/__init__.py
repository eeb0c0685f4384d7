"""The loop of learning, measured: what drift costs, what comes back, and what liars can do."""
