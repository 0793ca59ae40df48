"""Hosts that SkyPilot rents. `provider` is the way in; `program` alone imports sky, in SkyPilot's own environment."""
