"""Methods of the literature, behind the contracts of the engine: trained and training-free drafters, and beam search.

Nothing imports a module of this package unless a user asks for it by name (`registry` maps the names of the command line to drafters).
"""
