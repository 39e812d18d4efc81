"""Property tests are seeded, and judge behaviour, not how fast the machine is."""

from hypothesis import settings

settings.register_profile("stepserve", deadline=None, derandomize=True)
settings.load_profile("stepserve")
