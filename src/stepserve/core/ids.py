"""Names of things that live longer than one event."""

from typing import NewType

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
