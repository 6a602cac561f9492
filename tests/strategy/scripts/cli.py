"""A LightningCLI over a model and data of the user's own: `python cli.py fit --config FILE`."""

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from tests.harness.models import MLP, Pairs, Task, adamw


class Model(Task):
    def __init__(self, width: int = 15) -> None:
        super().__init__(MLP(7, width, 16), adamw)


class Data(LightningDataModule):
    def __init__(self, n: int = 32) -> None:
        super().__init__()
        self.n = n

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Pairs(self.n, 7), batch_size=8)


if __name__ == "__main__":
    LightningCLI(Model, Data)
