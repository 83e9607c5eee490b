"""What the launchers of Google's three places share: a bucket for the home, and requests that Google answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from muster.backends.bucket_launcher import BucketLauncher, P
from muster.backends.google.http import GoogleHttp, Http
from muster.backends.google.secret_manager import SecretManager
from muster.backends.google.session import Session


@dataclass(kw_only=True)
class GoogleLauncher(BucketLauncher[P], Generic[P]):
    """A launcher whose hosts are asked of Google."""

    http: Http = field(default_factory=lambda: GoogleHttp())

    def secrets(self) -> SecretManager:
        return SecretManager(session=self.session())

    def session(self) -> Session:
        return Session(http=self.http, clock=self.clock)
