"""The part of the fake broker that keeps users and rules, by the rules of Kafka's requests.

Rules are kept as they come (numbers of the wire), so that drivers and commands are judged by what
they send.
"""

from __future__ import annotations

import hashlib
from typing import Any

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct, decode_request

ANY, MATCH, LITERAL, PREFIXED = 1, 2, 3, 4
DIGESTS = {1: "sha256", 2: "sha512"}


class Users:
    """Mixed into `FakeBroker`."""

    def __init__(self) -> None:
        self.users: dict[str, dict[int, tuple[int, bytes, bytes]]] = {}
        """By name and number of the mechanism: iterations, salt, salted password."""
        self.rules: list[tuple[int, int, str, str, str, int, int]] = []
        """Resource type, pattern type, name, principal, host, operation, permission."""

    def has_password(self, user: str, mechanism: int, password: str) -> bool:
        """True when that is the user's password."""
        iterations, salt, salted = self.users[user][mechanism]
        digest = DIGESTS[mechanism]
        return hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations) == salted

    def _on_describe_user_scram_credentials(
        self, version: int, body: memoryview, code: ErrorCode
    ) -> Struct:
        request = decode_request(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, version, body)
        names = [one.name for one in request.users or ()] or sorted(self.users)
        rows = [
            Struct(
                user=name,
                error_code=0 if name in self.users else ErrorCode.RESOURCE_NOT_FOUND,
                credential_infos=[
                    Struct(mechanism=number, iterations=one[0])
                    for number, one in sorted(self.users.get(name, {}).items())
                ],
            )
            for name in names
        ]
        return Struct(error_code=code, results=[] if code else rows)

    def _on_alter_user_scram_credentials(
        self, version: int, body: memoryview, code: ErrorCode
    ) -> Struct:
        request = decode_request(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, version, body)
        rows = []
        for one in request.deletions:
            error = code
            if not code and self.users.get(one.name, {}).pop(one.mechanism, None) is None:
                error = ErrorCode.RESOURCE_NOT_FOUND
            if not self.users.get(one.name, {}):
                self.users.pop(one.name, None)
            rows.append(Struct(user=one.name, error_code=error))
        for one in request.upsertions:
            if not code:
                kept = one.iterations, bytes(one.salt), bytes(one.salted_password)
                self.users.setdefault(one.name, {})[one.mechanism] = kept
            rows.append(Struct(user=one.name, error_code=code))
        return Struct(results=rows)

    def _on_create_acls(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.CREATE_ACLS, version, body)
        for one in request.creations:
            rule = (
                one.resource_type,
                one.resource_pattern_type,
                one.resource_name,
                one.principal,
                one.host,
                one.operation,
                one.permission_type,
            )
            if not code and rule not in self.rules:
                self.rules.append(rule)
        return Struct(results=[Struct(error_code=code) for _ in request.creations])

    def _on_describe_acls(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DESCRIBE_ACLS, version, body)
        rows = [
            Struct(
                resource_type=kind,
                resource_name=name,
                pattern_type=pattern,
                acls=[Struct(principal=who, host=host, operation=operation, permission_type=what)],
            )
            for kind, pattern, name, who, host, operation, what in self._met(request)
        ]
        return Struct(error_code=code, resources=[] if code else rows)

    def _on_delete_acls(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DELETE_ACLS, version, body)
        results = []
        for one in request.filters:
            gone = [] if code else self._met(one)
            self.rules = [rule for rule in self.rules if rule not in gone]
            rows = [
                Struct(
                    error_code=0,
                    resource_type=kind,
                    resource_name=name,
                    pattern_type=pattern,
                    principal=who,
                    host=host,
                    operation=operation,
                    permission_type=what,
                )
                for kind, pattern, name, who, host, operation, what in gone
            ]
            results.append(Struct(error_code=code, matching_acls=rows))
        return Struct(filter_results=results)

    def _met(self, wanted: Any) -> list[tuple[int, int, str, str, str, int, int]]:
        """The rules that a filter means."""
        pattern, name = wanted.pattern_type_filter, wanted.resource_name_filter

        def fits(rule: tuple[int, int, str, str, str, int, int]) -> bool:
            is_named = name is None or rule[2] == name
            if pattern == MATCH and name is not None:
                is_prefix = rule[1] == PREFIXED and name.startswith(rule[2])
                is_named = is_named or rule[2] == "*" or is_prefix
            return (
                is_named
                and wanted.resource_type_filter in (ANY, rule[0])
                and pattern in (ANY, MATCH, rule[1])
                and wanted.principal_filter in (None, rule[3])
                and wanted.host_filter in (None, rule[4])
                and wanted.operation in (ANY, rule[5])
                and wanted.permission_type in (ANY, rule[6])
            )

        return [rule for rule in self.rules if fits(rule)]
