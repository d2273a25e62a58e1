# The service in a container: build a wheel first (python -m build --wheel), then docker build -t fedthe .
FROM python:3.12-slim
RUN useradd --create-home --uid 10001 fedthe
COPY dist/*.whl /tmp/
RUN wheel=$(ls /tmp/*.whl) && \
    pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch && \
    pip install --no-cache-dir "$wheel[serve,sign,postgresql]" && rm /tmp/*.whl
USER fedthe
WORKDIR /home/fedthe
VOLUME /home/fedthe/data
EXPOSE 8000
# Beyond the container it needs a token: docker run ... fedthe token create NAME --database data/streams.db
ENTRYPOINT ["fedthe"]
CMD ["serve", "/bundles", "--host", "0.0.0.0", "--port", "8000", "--database", "data/streams.db"]
