"""`terrace experiment scale`: the scheduler's own code on virtual time, with thousands of simulated nodes."""
