"""Property tests here have no deadline per example: machines stall."""

from hypothesis import settings

settings.register_profile("equipoise", deadline=None)
settings.load_profile("equipoise")
