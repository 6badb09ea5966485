"""Asks the client service for an answer, and its pods whether they counted it."""

import os
import re
import socket
import urllib.request

from corolla import Client


def keys() -> list[str]:
    lines = [line.strip() for line in os.environ.get("API_KEYS", "").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line and not line.startswith("#")]


def num_counted_tokens() -> float:
    """Of all client services together."""
    host, port = os.environ["METRICS_HOST"], int(os.environ["METRICS_PORT"])
    addresses = {each[4][0] for each in socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)}
    total = 0.0
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10) as answer:
            total += float(re.search(r"^corolla_generation_tokens_total (\S+)$", answer.read().decode(), re.M)[1])
    return total


before = num_counted_tokens()
with Client(os.environ["COROLLA_SERVER"], api_key=next(iter(keys()), None), timeout=120) as client:
    answer = client.generate("Once upon a time", max_tokens=8, temperature=0)
print(repr(answer.text))
assert answer.usage.completion_tokens > 0, "the answer is empty"
assert num_counted_tokens() >= before + answer.usage.completion_tokens, "the answer was not counted"
