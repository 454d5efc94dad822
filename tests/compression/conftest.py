"""Property tests here have no deadline per example: machines stall, and the first example compiles or imports."""

from hypothesis import settings

settings.register_profile("equipoise", deadline=None)
settings.load_profile("equipoise")
