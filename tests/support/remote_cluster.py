"""Remote instances without processes: threads behind carriers that mix messages up."""

import queue
import random
import threading

from stepserve.live.remote import RemoteInstance
from stepserve.live.transport_remote import RemoteTransport


class Scrambled:
    """One direction: messages overtake each other and come twice; some can be lost."""

    def __init__(self, seed, lost=()):
        self._chance = random.Random(seed)
        self._lost = frozenset(lost)  # by how many messages were sent before
        self._sent = 0
        self._held = []
        self._lock = threading.Lock()
        self.arrived = queue.Queue()
        self.reordered = self.repeated = 0

    def send(self, data):
        with self._lock:
            number, self._sent = self._sent, self._sent + 1
            if number not in self._lost:
                self._held.append((number, data))
            while self._held and (len(self._held) > 3 or self._chance.random() < 0.4):
                at = self._chance.randrange(len(self._held))
                self.reordered += at > 0
                self.arrived.put(self._held[at][1])
                if self._chance.random() < 0.2:
                    self.repeated += 1
                else:
                    del self._held[at]

    def end(self):
        self.arrived.put(None)


class End:
    """A ``Carrier`` over two directions."""

    def __init__(self, out, back):
        self._out, self._back = out, back
        self._next = None

    def send_bytes(self, data):
        self._out.send(data)

    def poll(self, timeout):
        if self._next is None:
            try:
                self._next = (self._back.arrived.get(timeout=timeout),)
            except queue.Empty:
                return False
        return True

    def recv_bytes(self):
        (data,), self._next = self._next, None
        if data is None:
            self._back.end()  # for whoever asks again
            raise EOFError
        return data

    def close(self):
        self._out.end()


def scrambled_pair(seed, lost=()):
    """Two ends; ``lost``: messages to the second end."""
    there, back = Scrambled(seed, lost), Scrambled(seed + 1)
    return End(there, back), End(back, there)


class ThreadProcess:
    """A ``Process`` that is a thread."""

    def __init__(self, recipe, spec, incarnation, ends, node):
        self._made = recipe, spec, incarnation, node
        self._near, self._far = ends

    def connect(self):
        instance = RemoteInstance(*self._made)
        threading.Thread(target=instance.serve, args=(self._far,), daemon=True).start()
        return self._near

    def lives(self):
        return True

    def kill(self):
        self._near.close()
        self._far.close()


def threads(*, apart=False, lost=()):
    """A ``deploy.HostInstances``. ``apart``: every instance believes that it has a node alone.

    ``lost``: messages that do not reach the first incarnation of the first instance.
    """

    def host(recipe, sink, listeners, predictor):
        def launch(spec, incarnation):
            index = spec.slot.gpus[0]
            ends = scrambled_pair(10 * index + incarnation, () if index or incarnation else lost)
            node = spec.id if apart else "one"
            return ThreadProcess(recipe, spec, incarnation, ends, node)

        return RemoteTransport(launch, sink, listeners, predictor, recipe.config.hang_s)

    return host
