"""`python -m shoal.health ADDRESS`: whether an orchestrator is up, or one of its devices is of use; by the exit code.

For health checks of containers, which run it every few seconds: it imports little. Says in a line what is missing.
"""

from __future__ import annotations

import argparse
import sys

from shoal.client import Client
from shoal.errors import ShoalError
from shoal.status import FleetStatus

TIMEOUT_S = 3.0
# States of a device that serves or stands by.
OF_USE = ("ready", "standby")


def problem_of(status: FleetStatus, device: str) -> str:
    """What is wrong with a device, or, if there is no pipeline, with all; empty if nothing is."""
    state = next((one.state for one in status.devices if one.worker_id == device), "not a member")
    if state not in OF_USE:
        return f"{device} is {state}"
    return "" if status.ready else f"the fleet is not ready: {status.waiting_for}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shoal.health", description=__doc__)
    parser.add_argument("address", help="the orchestrator's, HOST:PORT")
    parser.add_argument("--device", default="", help="a member that must be of use to a fleet that serves")
    options = parser.parse_args()
    try:
        with Client(options.address, timeout_s=TIMEOUT_S) as client:
            status = client.status()
    except ShoalError as error:
        sys.exit(error.message)
    sys.exit((options.device and problem_of(status, options.device)) or 0)


if __name__ == "__main__":
    main()
