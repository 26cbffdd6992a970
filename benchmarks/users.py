"""What breaks first with many users? A simulation of editors' requests to servers of two cores each; nothing is measured.

    python -m benchmarks.users [--users 1,10,100] [--servers N] [--routing hash|spread] [--seconds S] [--prefixes N] [--speed F]

Every user types all the time, as in `benchmarks.session`: log-normal pauses, `--think` seconds before each line of 30 characters. Each key
cancels the request under way and sends another, unless a suggestion is shown; a suggestion that comes before the next key is shown and,
with the probability `--accepted`, taken instead of typing the line.

A server works as that benchmark found Qwen2.5-Coder-1.5B on two cores of an AMD EPYC (Zen 4), suffix first: passes by number of
sequences, PROMPT_TOKENS of a prompt of which all but NEW_TOKENS come from the prefix cache if the user's is among its latest `--prefixes`,
a share of a pass for prompts beside running texts as the scheduler gives them. Beyond 64 that run and 64 that wait, requests are refused.
With `--routing hash` a user's requests go to one server, else to any. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks import common
from benchmarks.editor import KEY_DEVIATION_S, KEY_MEAN_S
from benchmarks.http_client import find_quantile

# ms of a pass by its sequences, and of each prompt token: measured on 26 November 2026, later figures are up to 5 % lower
PASS_ROWS, PASS_MS = (1, 4, 8, 16, 64), (35.5, 37.4, 50.3, 94.6, 370.0)
PROMPT_MS = 2430 / 512
PROMPT_TOKENS, NEW_TOKENS = 3000, 40  # of a session's prompts; computed at a key if the rest is in the cache: 220 ms
PASSES = 26  # of a suggestion: 929 ms after its first token
MAX_RUNNING, MAX_WAITING = 64, 64
PROMPT_SHARE = 3.0  # of a pass's time, that prompts may take besides
LINE = 30


@dataclass(eq=False)
class TypedRequest:
    """A suggestion that is being made."""

    user: int
    sent_s: float
    prompt_ms: float = 0.0
    passes_left: int = PASSES
    admitted: bool = False


@dataclass
class SimulatedServer:
    """Requests that run and wait, and whose prefixes are cached."""

    prefixes: int
    speed: float = 1.0
    at_s: float = 0.0
    busy_s: float = 0.0
    requests: dict[int, TypedRequest] = field(default_factory=dict)
    cached: OrderedDict[int, float] = field(default_factory=OrderedDict)
    """How many tokens of each user's prompt are computed."""

    def admit(self) -> None:
        """Let the oldest requests run, as many as may."""
        running = sum(r.admitted for r in self.requests.values())
        for request in list(self.requests.values()):
            if not request.admitted and running < MAX_RUNNING:
                request.admitted, running = True, running + 1
                request.prompt_ms = PROMPT_MS * max(NEW_TOKENS, PROMPT_TOKENS - self.cached.get(request.user, 0))

    def step(self) -> list[TypedRequest]:
        """Make one pass -> the requests whose suggestion is complete."""
        self.admit()
        active = [r for r in self.requests.values() if r.admitted]
        decoding = [r for r in active if r.prompt_ms <= 0]
        ms = float(np.interp(len(decoding), PASS_ROWS, PASS_MS)) if decoding else 0.0
        room = PROMPT_SHARE * ms if decoding else PASS_MS[0] * (1 + PROMPT_SHARE)
        done = []
        for request in sorted((r for r in active if r.prompt_ms > 0), key=lambda r: r.prompt_ms):
            part = min(request.prompt_ms, room)
            room, ms, request.prompt_ms = room - part, ms + part, request.prompt_ms - part
            self.cached[request.user] = max(self.cached.get(request.user, 0), PROMPT_TOKENS - request.prompt_ms / PROMPT_MS)
            self.cached.move_to_end(request.user)
            if len(self.cached) > self.prefixes:
                self.cached.popitem(last=False)
        self.at_s += ms / 1e3 / self.speed
        self.busy_s += ms / 1e3 / self.speed
        for request in decoding:
            request.passes_left -= 1
            if request.passes_left == 0:
                del self.requests[request.user]
                done.append(request)
        return done


def simulate_users(n_users: int, n_servers: int, routing: str, args: argparse.Namespace) -> dict[str, float | None]:
    """Return what users get: shares of keys, quantiles of waits in seconds."""
    rng = random.Random(args.seed)
    spread = math.sqrt(math.log(1 + (KEY_DEVIATION_S / KEY_MEAN_S) ** 2))
    servers = [SimulatedServer(args.prefixes, args.speed) for _ in range(n_servers)]
    column, shown = [0] * n_users, [False] * n_users
    place: list[SimulatedServer | None] = [None] * n_users
    waits: list[float] = []
    sent = refused = hits = 0
    keys = [(rng.uniform(0, args.think), user) for user in range(n_users)]
    heapq.heapify(keys)
    while keys[0][0] < args.seconds:
        now, user = keys[0]
        for server in servers:
            while server.requests and server.at_s < now:
                for request in server.step():
                    if place[request.user] is server:
                        shown[request.user], place[request.user] = True, None
                        waits.append(server.at_s - request.sent_s)
            server.at_s = max(server.at_s, now)
        if (server := place[user]) is not None:  # type: ignore[assignment]
            server.requests.pop(user, None)
            place[user] = None
        taken = shown[user] and rng.random() < args.accepted
        column[user] = 0 if taken or column[user] + 1 >= LINE else column[user] + 1
        if taken or not shown[user] or rng.random() >= args.accepted:
            shown[user] = False
            server = servers[user % n_servers if routing == "hash" else rng.randrange(n_servers)]
            sent += 1
            if len(server.requests) >= MAX_RUNNING + MAX_WAITING:
                refused += 1
            else:
                hits += server.cached.get(user, 0) >= PROMPT_TOKENS - NEW_TOKENS
                server.requests[user] = TypedRequest(user, now)
                place[user] = server
        pause = rng.lognormvariate(math.log(KEY_MEAN_S) - spread**2 / 2, spread) + (args.think if column[user] == 0 else 0)
        heapq.heapreplace(keys, (now + pause, user))
    return {
        "users": n_users,
        "servers": n_servers,
        "busy": round(sum(s.busy_s for s in servers) / n_servers / args.seconds, 3),
        "shown": round(len(waits) / max(sent, 1), 4),
        "shown_per_user_minute": round(60 * len(waits) / n_users / args.seconds, 2),
        "wait_p50_s": round(find_quantile(waits, 0.5), 2) if waits else None,
        "cached": round(hits / max(sent - refused, 1), 3),
        "refused": round(refused / max(sent, 1), 4),
        "requests_per_s": round(sent / args.seconds, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.make_parser("users", __doc__)
    parser.add_argument("--users", type=common.parse_counts, default=[1, 2, 5, 10, 20, 50, 100], metavar="N,…")
    parser.add_argument("--servers", type=common.parse_positive, default=1, metavar="N")
    parser.add_argument("--routing", choices=("hash", "spread"), default="hash")
    parser.add_argument("--seconds", type=common.parse_positive, default=120, metavar="S", help="that are simulated")
    parser.add_argument("--prefixes", type=common.parse_positive, default=50, metavar="N", help="users whose prompts the KV cache holds")
    parser.add_argument("--speed", type=common.parse_number, default=1.0, metavar="F", help="of a server, against those two cores")
    parser.add_argument("--think", type=common.parse_number, default=2.0, metavar="S", help="before a line")
    parser.add_argument(
        "--accepted", type=common.parse_number, default=0.3, metavar="P", help="share of suggestions that are taken, an assumption"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    results = [simulate_users(n, args.servers, args.routing, args) for n in args.users]
    common.print_table(list(results[0]), [list(result.values()) for result in results])
    settings = {name: value for name, value in vars(args).items() if name != "users"}
    common.print_document({"program": "users", "results": results, "settings": settings})


if __name__ == "__main__":
    main()
