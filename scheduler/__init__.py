"""The scheduler: takes jobs over HTTP, spreads their tasks over the end devices, and loses none of them."""
