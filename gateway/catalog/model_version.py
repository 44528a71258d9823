"""One model behind the gateway: its text, its workers, and the requests that are on it."""

from baton.protocol import CONSTRAINTS, DEFAULT_TENANT
from gateway.config.served_model import ServedModel
from gateway.fleet.model_fleet import ModelFleet
from gateway.orchestration.pipeline import Pipeline
from gateway.pooling.pooling_pipeline import PoolingPipeline


class ModelVersion:
    """Belongs to the event loop. Of one name there are two while one is replaced."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.pooling = PoolingPipeline(pipeline)
        self.num_running = 0  # requests on it

    @property
    def fleet(self) -> ModelFleet:
        """Its workers."""
        return self.pipeline.fleet

    @property
    def name(self) -> str:
        """The name by which requests ask for it."""
        return self.fleet.name

    def seen_by(self, tenant: str = DEFAULT_TENANT) -> ServedModel:
        """Return what requests of a tenant are checked against."""
        return self.fleet.model.seen_by(tenant)

    def note_change(self) -> None:
        """Take a change of the fleet: requests that wait may go on, and constraints may come."""
        self.pipeline.queues.call_first()
        if self.fleet.can(CONSTRAINTS):
            self.pipeline.text.expect_constraints()

    def close(self) -> None:
        """End the threads of its text."""
        self.pipeline.text.close()
