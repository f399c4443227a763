"""Synthetic fleets.

Diurnal: devices are distributed over time zones by population and are available at night. Each device has its own
habits; the seven nights of its trace vary, and some are missing (the phone was not charged). The speeds of devices and
links are log-normal around a median:

    bedtime  N(23 h, 1 h) + N(0, 0.5 h) each night      sleep  N(7.5 h, 1 h) + N(0, 0.5 h)      a night is missed: 10 %
    seconds_per_sample  0.005 s x exp N(0, 0.6)      down  20 Mbit/s x exp N(0, 0.8)      up  5 Mbit/s x exp N(0, 0.8)
"""

import numpy as np

from fedcluster.fleet.availability import build
from fedcluster.fleet.fleet_file import DeviceTable
from fedcluster.fleet.timezones import DAY, HOUR, hours_ahead
from fedcluster.rng import stream

POPULATION = {  # people with a phone, roughly, in hundred millions
    "Pacific/Auckland": 0.1,
    "Australia/Sydney": 0.3,
    "Asia/Tokyo": 1.8,
    "Asia/Shanghai": 11.0,
    "Asia/Jakarta": 3.0,
    "Asia/Dhaka": 1.8,
    "Asia/Kolkata": 9.0,
    "Asia/Karachi": 2.0,
    "Asia/Dubai": 0.6,
    "Europe/Moscow": 2.2,
    "Africa/Cairo": 3.5,
    "Europe/Berlin": 4.0,
    "Africa/Lagos": 3.0,
    "Europe/London": 1.0,
    "Atlantic/Cape_Verde": 0.1,
    "America/Sao_Paulo": 2.6,
    "America/New_York": 2.6,
    "America/Mexico_City": 2.0,
    "America/Denver": 0.3,
    "America/Los_Angeles": 0.8,
    "Pacific/Honolulu": 0.1,
}
NIGHTS = 7


def diurnal(devices: int, seed: int, date: str) -> DeviceTable:
    """A fleet of this many devices. `date` says which time zones have daylight saving time."""
    rng = stream(seed, "world")
    weights = np.array(list(POPULATION.values()))
    zone = rng.choice(len(weights), devices, p=weights / weights.sum())
    ahead = np.array([hours_ahead(name, date) for name in POPULATION])[zone]
    bed = rng.normal(23, 1, (devices, 1)) + rng.normal(0, 0.5, (devices, NIGHTS)) + 24 * np.arange(NIGHTS)
    sleep = np.maximum(0.5, rng.normal(7.5, 1, (devices, 1)) + rng.normal(0, 0.5, (devices, NIGHTS)))
    slept = rng.random((devices, NIGHTS)) >= 0.1
    begin = np.round((bed - ahead[:, None])[slept] * HOUR).astype(np.int64)
    length = np.round(sleep[slept] * HOUR).astype(np.int64)
    owner = np.repeat(np.arange(devices), slept.sum(axis=1))
    return DeviceTable(
        utc_offset=ahead,
        seconds_per_sample=0.005 * np.exp(rng.normal(0, 0.6, devices)),
        down_mbps=20 * np.exp(rng.normal(0, 0.8, devices)),
        up_mbps=5 * np.exp(rng.normal(0, 0.8, devices)),
        availability=build(owner, begin, begin + length, np.full(devices, NIGHTS * DAY)),
    )
