"""Values and pure decisions of the scheduler: no I/O, no clock, no random numbers. Time is passed in."""
