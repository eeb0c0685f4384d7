"""The sink kind `mqtt`. Its connection, in `mqtt_link`, needs the extra `mqtt`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from scheduler.sinks.mqtt_options import MqttOptions
from scheduler.sinks.protocol import Delivery, SinkContext, SinkKind

__all__ = ["MQTT", "MqttKind"]


class MqttKind:
    """Publishes events, and the retained state of each source, to an MQTT 5 broker."""

    Options = MqttOptions

    def open(self, options: MqttOptions, context: SinkContext) -> AbstractAsyncContextManager[Delivery]:
        """Connect to the broker."""
        from scheduler.sinks.mqtt_link import opened  # needs the extra

        return opened(options, context)


MQTT: SinkKind = MqttKind()
