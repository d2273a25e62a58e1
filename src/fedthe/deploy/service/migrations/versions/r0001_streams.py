"""Streams, and the answers to their samples. There is no way back from a migration but a backup."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "streams",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("bundle", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "answers",
        sa.Column("stream", sa.String, sa.ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("key", sa.String),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("logged", sa.Boolean, nullable=False),
        sa.UniqueConstraint("stream", "key"),
    )
