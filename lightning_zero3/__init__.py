from lightning_zero3.errors import Zero3Error
from lightning_zero3.layer import Zero3Layer
from lightning_zero3.sequential import Zero3Sequential
