"""Runs in a pod of the cluster, by `python - SERVICE POD POD < inside.py`; prints the answers as JSON.

SERVICE is the client service's address by its Service's name, the others are those of two of its pods.
"""

import json
import sys

from corolla import Client

service, first_pod, second_pod = sys.argv[1:]
with Client(service, timeout=300) as client:
    generated = client.generate("The capital of France is", max_tokens=16, temperature=0, ignore_eos=True)
    with client.chat(temperature=0, max_tokens=16) as chat:
        streamed = "".join(chunk.text for chunk in chat.stream("What is the capital of France?"))

with Client(first_pod, timeout=300) as first, Client(second_pod, timeout=300) as second:
    chat = first.chat(temperature=0, max_tokens=16)
    reply = chat.send("What is the capital of France?")
    going_on = second.chat(session=chat.session_id, temperature=0, max_tokens=16)
    second_turn = going_on.send("And of Italy?")
    second.delete_session(chat.session_id)

json.dump(
    {
        "generated": list(generated.token_ids),
        "streamed": streamed,
        "first_turn": reply.text,
        "cached_in_second_turn": second_turn.usage.cached_tokens,
    },
    sys.stdout,
)
