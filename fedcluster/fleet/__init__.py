"""The fleet: what is known of the devices, when they are available, who shares a cluster, and the schedule."""
