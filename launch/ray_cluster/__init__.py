"""The only importer of ray: a fleet's workers on the nodes of a cluster, and other work that is spread over them.

`dispatcher` runs as a process of its own (`ray_fleet` starts it), because Ray ends processes that have lost its head. `work`
is for commands. Both begin with `connection`.
"""

import os

# Ray reads both when it is imported. A fleet reports to nobody.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# This process has nothing to lose: without a head it ends, and the next one tries again.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
