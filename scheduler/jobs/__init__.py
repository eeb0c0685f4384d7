"""Use cases of jobs, one a file: submit, recover, query, follow, classify."""
