"""A module that cannot be imported: what somebody else's code may be like."""

raise RuntimeError("1 is not a policy")
