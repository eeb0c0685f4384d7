"""Local fleet launcher: the services of one machine as processes, started and stopped together."""

from tierkit.fleet.launcher import TERRACE, Exit, Fleet, LaunchOptions, RunningService, launch
from tierkit.fleet.plan import MAX_NODES, SCHEDULER, FleetPlan, ServicePlan, local_plan, read_fleet_file
from tierkit.fleet.processes import chosen, kill_service, launched_services

__all__ = [
    "MAX_NODES",
    "SCHEDULER",
    "TERRACE",
    "Exit",
    "Fleet",
    "FleetPlan",
    "LaunchOptions",
    "RunningService",
    "ServicePlan",
    "chosen",
    "kill_service",
    "launch",
    "launched_services",
    "local_plan",
    "read_fleet_file",
]
