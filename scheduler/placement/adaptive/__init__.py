"""The scheme `adaptive`: each task goes where, by what is known now, it brings the job's end nearest.

`estimates` says how fast nodes and links are, `backlog` when a node will be done with what it has, `planner` where a
task goes and why, `encoding` where its images are encoded. They are pure; `pilot` holds their state and is told of
every dispatch and answer.
"""
