"""What a client is told when it is made, checked in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .address import Address
from .call import Request

URL = "http://127.0.0.1:7070"
TIMEOUT_S, GENERATE_TIMEOUT_S = 60.0, 600.0
ANSWER_MAX = 64 << 20


@dataclass(frozen=True)
class Settings:
    """See `Client`."""

    address: Address
    token: str | None = field(repr=False)
    tenant: str | None
    timeout: float
    generate_timeout: float
    max_answer: int

    @classmethod
    def of(
        cls, url: str | None, token: str | None, tenant: str | None, timeout: float, generate_timeout: float,
        max_answer: int,
    ) -> Settings:
        """Raises ValueError."""
        url = url if url is not None else os.environ.get("ENGRAM_URL") or URL
        token = token if token is not None else os.environ.get("ENGRAM_TOKEN") or None
        # Anything else would end the header, or begin another. The token itself is never told.
        if token is not None and not all("!" <= letter <= "~" for letter in token):
            raise ValueError("the token is not of visible ASCII characters")
        if not (timeout > 0 and generate_timeout > 0 and max_answer > 0):
            raise ValueError("times and limits must be above 0")
        return cls(Address.parse(url), token, tenant, timeout, generate_timeout, max_answer)

    def seconds(self, request: Request) -> float:
        """How long its answer, or each piece of it, may take."""
        return max(self.generate_timeout if request.long else self.timeout, request.patience)

    def lines(self, request: Request) -> list[tuple[str, str]]:
        """Its header lines."""
        return request.lines(self.address.host_header, self.token)
