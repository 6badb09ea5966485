"""Asks the client service for an answer, and its pods whether they counted it."""

import os
import re
import socket
import sys
import urllib.request
from pathlib import Path

import grpc

from corolla import Client, errors


def num_counted_tokens() -> float:
    """The tokens that all client services together have counted."""
    host, port = os.environ["METRICS_HOST"], int(os.environ["METRICS_PORT"])
    addresses = {each[4][0] for each in socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)}
    total = 0.0
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10) as answer:
            total += float(re.search(r"^corolla_generation_tokens_total (\S+)$", answer.read().decode(), re.M)[1])
    return total


def credentials() -> grpc.ChannelCredentials | None:
    """None: callers speak in the clear."""
    if (file := os.environ.get("CA_FILE")) is None:
        return None
    return grpc.ssl_channel_credentials(Path(file).read_bytes())


before = num_counted_tokens()
options = {"api_key": os.environ.get("API_KEY"), "credentials": credentials(), "timeout": 120}
try:
    with Client(os.environ["COROLLA_SERVER"], **options) as client:
        answer = client.generate("Once upon a time", max_tokens=8, temperature=0)
except errors.Unauthenticated:
    sys.exit("helm test needs a key of its own: put one into the Secret of client.apiKeys under client.apiKeys.testKey")
print(repr(answer.text))
assert answer.usage.completion_tokens > 0, "the model's answer is empty"
assert num_counted_tokens() >= before + answer.usage.completion_tokens, "the answer was not counted"
