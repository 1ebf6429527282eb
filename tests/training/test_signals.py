import signal

import pytest

from hypersphere.training import signals


def test_interrupts_ignore_the_forwarded_signal_of_the_launcher(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    alone, launched = signals.Interrupts(), signals.Interrupts(echo=5.0)
    for one in (alone, launched):
        with pytest.raises(KeyboardInterrupt):
            one(signal.SIGTERM, None)  # nothing can be saved yet
        assert not one.received
        one.deferred = True
        one(signal.SIGTERM, None)
        assert one.received
    now[0] += 4.9
    launched(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        alone(signal.SIGTERM, None)
    now[0] += 0.2
    with pytest.raises(KeyboardInterrupt):
        launched(signal.SIGTERM, None)
