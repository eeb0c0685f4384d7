"""Values and pure decisions of the scheduler: no I/O, no clock, no chance. Time is passed in."""
