"""Functions of Ray that are replaced: once, and only where there are such."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from raycollect.ray_bridge import ray_session
from raycollect.ray_bridge.hooks import hook


def test_a_function_is_wrapped_once() -> None:
    owner = SimpleNamespace(function=lambda: ["Ray"])
    for name in ("first", "second"):
        hook(owner, "function", lambda function, name=name: lambda: [name, *function()])
    assert owner.function() == ["first", "Ray"]
    with pytest.raises(AttributeError):
        hook(owner, "another", lambda function: function)


def test_calls_come_before_ray_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest first, as `atexit` does; none where no Ray runs."""
    calls: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(ray, "shutdown", lambda: calls.append("Ray"))
        patched.setattr("ray._private.worker.Worker.connected", True)
        withdraw = [
            ray_session.before_shutdown(lambda: calls.append("last"), is_last=True),
            ray_session.before_shutdown(lambda: calls.append("second")),
            ray_session.before_shutdown(lambda: calls.append("first")),
        ]
        ray.shutdown()
        assert calls == ["first", "second", "last", "Ray"]
        withdraw[1]()
        withdraw[1]()
        ray.shutdown()
        assert calls[4:] == ["first", "last", "Ray"]
        patched.setattr("ray._private.worker.Worker.connected", False)
        ray.shutdown()
        assert calls[7:] == ["Ray"]
        withdraw[0]()
        withdraw[2]()
