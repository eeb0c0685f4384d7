"""The scheme `adaptive`: each task goes to the nodes with which its job is expected to end first.

`estimates` holds the speeds of nodes and links, and `backlog` predicts when a node has finished its work. `planner`
chooses the nodes of a task, with the reason, and `encoding` the node that encodes its images. They are pure; `pilot`
holds their state and receives every dispatch and answer.
"""
