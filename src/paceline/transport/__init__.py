"""Who is there, and how they reach each other."""

from paceline.transport.alone import Alone
from paceline.transport.base import Collective, Pending, Transport
from paceline.transport.elastic.transport import Elastic, joins_roster
from paceline.transport.fixed import FixedTransport, launched

__all__ = ["Alone", "Collective", "Elastic", "FixedTransport", "Pending", "Transport", "joins_roster", "launched"]
