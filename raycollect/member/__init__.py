"""The actor's side: the mixin, what a controller does with this process, and the operations that members call."""
