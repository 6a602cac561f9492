"""Callbacks for any LightningModule, and those of Lightning that cannot work on shards."""
