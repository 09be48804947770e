"""Ports that are given to a control plane."""

import subprocess
import sys
from pathlib import Path

from autoscaler.testbed import plane
from autoscaler.testbed.plane import PORTS_TO_GIVE, free_ports

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
ASK = "from autoscaler.testbed import plane; print(plane._take({}))"


def test_no_port_is_given_twice_or_to_an_outgoing_connection() -> None:
    given = free_ports(40)
    assert len(set(given)) == 40
    assert set(given) <= set(PORTS_TO_GIVE)
    assert max(given) < int(OUTGOING.read_text().split()[0])
    assert not plane._take(given[0])


def test_another_process_is_not_given_it_until_this_one_ends() -> None:
    (port,) = free_ports(1)
    answer = subprocess.run([sys.executable, "-c", ASK.format(port)], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "False"
    plane._TAKEN.pop(port).close()
    answer = subprocess.run([sys.executable, "-c", ASK.format(port)], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "True"
