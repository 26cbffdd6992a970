"""Old names of modules that users import, kept for one release. See `ngramspec.guests`."""
