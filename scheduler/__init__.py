"""The scheduler: takes jobs over HTTP, spreads their tasks over the end devices, and loses none of them.

ingest/       an upload becomes one raw array of pixels, or a clear refusal
inputs        those arrays as files beside the database
store/        jobs, tasks and results in the database; group commit
devices       the device list: registrations, leases, health
mapping       who forwards to whom (Eq. 1-6 of the paper); pure
dispatch      which task goes to which end device next; pure
attempt       one try of one task on one end device
dispatcher    the loops that join the above
service, app  the behaviour behind the HTTP API, and the API
"""
