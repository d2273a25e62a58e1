"""Tokens, and which of them a stream belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("digest", sa.String, unique=True),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
    )
    # by hand, because SQLite adds a reference together with its column only, and Alembic would add it afterwards
    op.execute("ALTER TABLE streams ADD COLUMN token_id INTEGER REFERENCES tokens (id)")
    op.create_index("ix_streams_token_id", "streams", ["token_id"])
