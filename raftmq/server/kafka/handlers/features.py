"""UpdateFeatures: raise what all nodes of the cluster can do (KIP-584); the controller decides."""

from __future__ import annotations

from typing import Any, Final

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import FeatureRequest, Outcomes, UpdateFeaturesCall
from raftmq.metadata.features import SAFE_DOWNGRADE, UPGRADE
from raftmq.promise import Promise
from raftmq.protocol import Struct
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext

UPDATES_MAX: Final = 100
_TYPES_FROM: Final = 1
_ONE_ERROR_FROM: Final = 2


def update_features(
    broker: Broker, context: RequestContext, request: Struct
) -> Promise[dict[str, Any]] | dict[str, Any]:
    """Answer UpdateFeatures: all levels of a request are finalized, or none."""
    version = context.api_version
    if len(request.feature_updates) > UPDATES_MAX:
        code, message = ErrorCode.INVALID_REQUEST, f"more than {UPDATES_MAX} features"
        return _answer(version, [], code, message)
    names = [update.feature for update in request.feature_updates]
    call = UpdateFeaturesCall(
        updates=tuple(_request(update, version) for update in request.feature_updates),
        timeout_ms=max(request.timeout, 0),
        validate_only=version >= _TYPES_FROM and bool(request.validate_only),
    )
    answer: Promise[dict[str, Any]] = Promise()

    def settled(done: Promise[Outcomes]) -> None:
        if done.error is None:
            outcomes = done.result()
            rows = [(outcome.name, outcome.code, outcome.message) for outcome in outcomes]
            answer.resolve(_answer(version, rows))
        else:
            code, message = broker.explain(done.error)
            answer.resolve(_answer(version, [(name, code, message) for name in names]))

    broker.call_controller(call).when_done(settled)
    return answer


def _request(update: Struct, version: int) -> FeatureRequest:
    if version >= _TYPES_FROM:
        return FeatureRequest(update.feature, update.max_version_level, update.upgrade_type)
    kind = SAFE_DOWNGRADE if update.allow_downgrade else UPGRADE
    return FeatureRequest(update.feature, update.max_version_level, kind)


def _answer(
    version: int,
    rows: list[tuple[str, ErrorCode, str | None]],
    code: ErrorCode = ErrorCode.NONE,
    message: str | None = None,
) -> dict[str, Any]:
    if version >= _ONE_ERROR_FROM:
        for _, refusal, why in rows:
            if refusal is not ErrorCode.NONE:
                code, message = refusal, why
                break
        return {"throttle_time": 0, "error_code": code, "error_message": message}
    return {
        "throttle_time": 0,
        "error_code": code,
        "error_message": message,
        "results": [
            {"feature": name, "error_code": refusal, "error_message": why}
            for name, refusal, why in rows
        ],
    }
