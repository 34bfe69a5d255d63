"""`python -m objectcache_relay`: run one relay until it is told to stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from objectcache.channel.authorities import ca_file_of, client_context
from objectcache_relay.dispatch_report import DispatchReporter, DispatchTarget
from objectcache_relay.relay_process import ForwardingProcess, Reporter, run_command
from objectcache_relay.server import Relay
from objectcache_relay.sessions import EngineSocket
from objectcache_runtime.networking.listening import HostPort


class RelayProcess(ForwardingProcess):
    """A relay: it tells the dispatch service of itself."""

    name = "relay"
    description = (
        "Run ObjectCache's relay: deliveries over this node's storage NIC, sent on to engines."
    )
    without_effect = ("fetcher",)
    _target: DispatchTarget | None = None

    @property
    def listen(self) -> str:
        return self.settings.relay.listen

    @property
    def metrics_listen(self) -> str:
        return self.settings.relay.metrics_listen

    @property
    def log_level(self) -> str:
        return self.settings.relay.log_level

    @property
    def engines(self) -> EngineSocket | None:
        path = self.settings.relay_socket
        return None if path is None else EngineSocket(path)

    def prepare(self, listening: HostPort, scheme: str) -> None:
        self._target = DispatchTarget.of(self.settings.relay, listening, scheme)

    def reporters(self, relay: Relay, can_serve: Callable[[], bool]) -> Sequence[Reporter]:
        """One for each replica of the dispatch service."""
        target = self._target
        if target is None:
            return ()
        tls = client_context(ca_file_of(os.environ))
        landings = relay.means.landings
        reporters = [DispatchReporter(target, url, landings, tls, can_serve) for url in target.urls]
        for reporter in reporters:
            reporter.start()
        return reporters


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(RelayProcess, arguments, os.environ)


if __name__ == "__main__":
    sys.exit(main())
